# libattnpack_cuda, the CUDA kernels: built where nvcc and a CUDA torch are found, or on request (-DATTNPACK_CUDA=ON).
# The .cu files see no header of torch, so that any nvcc from 12.0 on builds them, for any torch. Needs no GPU.
set(ATTNPACK_CUDA AUTO CACHE STRING "build libattnpack_cuda: ON, OFF, or AUTO: where nvcc and a CUDA torch are found")
set(ATTNPACK_CUDA_ARCHITECTURES "80-real;90" CACHE STRING "architectures of libattnpack_cuda, as CMake names them")
set(ATTNPACK_HAS_CUDA OFF)

if(ATTNPACK_CUDA STREQUAL "AUTO")
  if(EXISTS "${ATTNPACK_TORCH_DIR}/lib/libtorch_cuda.so")
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(ATTNPACK_HAS_CUDA ON)
    endif()
  endif()
elseif(ATTNPACK_CUDA)
  set(ATTNPACK_HAS_CUDA ON)
endif()

if(ATTNPACK_HAS_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES ${ATTNPACK_CUDA_ARCHITECTURES})
  enable_language(CUDA)
  message(STATUS "CUDA kernels: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${ATTNPACK_CUDA_ARCHITECTURES}")
  file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/csrc/ops/cuda/*.cu)
  add_library(attnpack_cuda SHARED ${cuda_sources})
  set_target_properties(attnpack_cuda PROPERTIES
    CUDA_RUNTIME_LIBRARY Static CUDA_SEPARABLE_COMPILATION OFF
    BUILD_RPATH "${CMAKE_BINARY_DIR}" INSTALL_RPATH "$ORIGIN")
  target_include_directories(attnpack_cuda PRIVATE ${CMAKE_BINARY_DIR}/include)
  target_compile_options(attnpack_cuda PRIVATE -std=c++20 -O3)  # CMake 3.25 does not know how nvcc 13 names it
  target_link_libraries(attnpack_cuda PRIVATE $<TARGET_FILE:attnpack>)
  add_dependencies(attnpack_cuda attnpack)
  # Its one undefined symbol is attnpack::set_cuda_kernels: torch's libraries need not be resolved here.
  target_link_options(attnpack_cuda PRIVATE LINKER:--allow-shlib-undefined)
  install(TARGETS attnpack_cuda LIBRARY DESTINATION lib)
endif()
