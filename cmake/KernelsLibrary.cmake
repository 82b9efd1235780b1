# libattnpack_kernels: the kernels of all instruction sets, the threads that help with them, and the functions of
# attnpack/kernels.h. It needs nothing of torch, and is the same for every torch and Python. In a wheel it lies in the
# package itself, beside the folders torch-X.Y, which share it.
find_package(Threads REQUIRED)
attnpack_add_kernels(isa_objects)
file(GLOB kernels_sources CONFIGURE_DEPENDS csrc/attnpack/kernels/*.cpp)
add_library(attnpack_kernels SHARED ${kernels_sources} csrc/attnpack/threads/thread_pool.cpp ${isa_objects})
add_library(attnpack::kernels ALIAS attnpack_kernels)  # the name that find_package(attnpack_kernels) gives
set_target_properties(attnpack_kernels PROPERTIES
  EXPORT_NAME kernels CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_compile_definitions(attnpack_kernels PRIVATE ${ATTNPACK_ISA_DEFINITIONS})
target_compile_options(attnpack_kernels PRIVATE -Wall -Wno-psabi -Wno-maybe-uninitialized -O2)
target_include_directories(attnpack_kernels SYSTEM INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/csrc> $<INSTALL_INTERFACE:include>)
target_include_directories(attnpack_kernels PRIVATE csrc)
target_link_libraries(attnpack_kernels PRIVATE Threads::Threads)
attnpack_take_old_glibc(attnpack_kernels)
if(NOT APPLE)  # without what only libattnpack takes of old_glibc.cpp; dlclose leaves the code of threads that sleep
  target_link_options(attnpack_kernels PRIVATE LINKER:--gc-sections LINKER:-z,nodelete)
endif()
# Names with a version, for a system that keeps several. A wheel cannot hold links, and Python's package keeps its
# libraries to itself, as torch does.
function(attnpack_name_with_version target)
  if(NOT ATTNPACK_PYTHON)
    set_target_properties(${target} PROPERTIES
      VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  endif()
endfunction()
attnpack_name_with_version(attnpack_kernels)

set(kernels_config_dir share/cmake/attnpack_kernels)
install(TARGETS attnpack_kernels EXPORT attnpack_kernelsTargets LIBRARY DESTINATION lib COMPONENT kernels)
install(FILES csrc/attnpack/kernels.h DESTINATION include/attnpack COMPONENT kernels)
install(EXPORT attnpack_kernelsTargets NAMESPACE attnpack:: DESTINATION ${kernels_config_dir} COMPONENT kernels)
configure_file(cmake/attnpack_kernelsConfig.cmake attnpack_kernelsConfig.cmake COPYONLY)
include(CMakePackageConfigHelpers)
write_basic_package_version_file(attnpack_kernelsConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/attnpack_kernelsConfig.cmake
        ${CMAKE_CURRENT_BINARY_DIR}/attnpack_kernelsConfigVersion.cmake
        DESTINATION ${kernels_config_dir} COMPONENT kernels)
configure_file(cmake/attnpack_kernels.pc.in attnpack_kernels.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/attnpack_kernels.pc DESTINATION lib/pkgconfig COMPONENT kernels)
