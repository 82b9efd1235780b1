# Installs what the wheel carries: library, headers, the packages for find_package(attnpack) and for pkg-config, and
# build.json. Python reads build.json before it loads anything, to learn what the build was made for.
include(CMakePackageConfigHelpers)
set(config_dir share/cmake/attnpack)

install(TARGETS attnpack EXPORT attnpackTargets LIBRARY DESTINATION lib)
install(DIRECTORY csrc/attnpack DESTINATION include FILES_MATCHING PATTERN "*.h"
        REGEX "/(core|kernels|threads|detail|ops/(cpu|cuda|meta|autograd|autocast|batched|lazy))$" EXCLUDE
        PATTERN attnpack/kernels.h EXCLUDE)
install(EXPORT attnpackTargets NAMESPACE attnpack:: DESTINATION ${config_dir})
configure_package_config_file(cmake/attnpackConfig.cmake.in attnpackConfig.cmake INSTALL_DESTINATION ${config_dir}
                              NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(attnpackConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/attnpackConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/attnpackConfigVersion.cmake
        cmake/TorchTargets.cmake cmake/AskPythonForTorch.cmake DESTINATION ${config_dir})
# torch is a neighbour of the package in site-packages, and stays where it is otherwise.
set(ATTNPACK_PC_TORCH_DIR ${ATTNPACK_BUILT_TORCH})
if(ATTNPACK_WHEEL)
  set(ATTNPACK_PC_TORCH_DIR "\${prefix}/${ATTNPACK_NEAR_TORCH}")
endif()
set(ATTNPACK_PC_KERNELS "-Wl,-rpath-link,\${prefix}/${ATTNPACK_NEAR_KERNELS}/lib")
set(ATTNPACK_PC_TORCH "-Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -Wl,--allow-shlib-undefined")
if(APPLE)
  set(ATTNPACK_PC_KERNELS "")
  set(ATTNPACK_PC_TORCH "-ltorch -ltorch_cpu -lc10")
endif()
configure_file(cmake/attnpack.pc.in attnpack.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/attnpack.pc DESTINATION lib/pkgconfig)
configure_file(cmake/build.json.in build.json @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/build.json DESTINATION share/attnpack)
