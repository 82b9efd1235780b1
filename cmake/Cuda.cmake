# libattnpack_cuda holds the CUDA kernels. It is built where nvcc and a CUDA torch are found, or on request
# (-DATTNPACK_CUDA=ON). The .cu files see no header of torch, so any nvcc from 12.0 on builds them for any torch. No GPU
# is needed. nvcc is called directly: CMake 3.25 does not know how newer versions name C++20, and its checks of the
# language are slow (PERFORMANCE.md).
set(ATTNPACK_CUDA AUTO CACHE STRING "build libattnpack_cuda: ON, OFF, or AUTO: where nvcc and a CUDA torch are found")
set(ATTNPACK_CUDA_ARCHITECTURES AUTO CACHE STRING
    "architectures of libattnpack_cuda, each with its PTX. ALL: 80, 90 and those of 100 and 120 that nvcc has. AUTO: \
those of TORCH_CUDA_ARCH_LIST, else those of the GPUs that are here, else ALL")
set(ATTNPACK_HAS_CUDA OFF)

if(NOT ATTNPACK_CUDA STREQUAL "OFF")
  find_program(ATTNPACK_NVCC nvcc HINTS ENV CUDA_HOME PATH_SUFFIXES bin)
  if(ATTNPACK_NVCC AND (ATTNPACK_CUDA STREQUAL "ON" OR EXISTS "${ATTNPACK_TORCH_DIR}/lib/libtorch_cuda.so"))
    set(ATTNPACK_HAS_CUDA ON)
  elseif(ATTNPACK_CUDA STREQUAL "ON")
    message(FATAL_ERROR "attnpack: ATTNPACK_CUDA is ON, but no nvcc was found: put its folder on the PATH, set CUDA_HOME "
                        "or pass -DATTNPACK_CUDA=OFF.")
  endif()
endif()

if(ATTNPACK_HAS_CUDA)
  include(${CMAKE_CURRENT_LIST_DIR}/CudaArchitectures.cmake)
  attnpack_cuda_architectures(cuda_architectures)
  message(STATUS "CUDA kernels: ${ATTNPACK_NVCC}, architectures ${cuda_architectures}")
  # --threads 0: nvcc compiles the architectures of a file beside each other.
  set(nvcc_flags -std=c++20 -O3 --threads 0 -Xcompiler -fPIC -ccbin ${CMAKE_CXX_COMPILER})
  set(sm90_flags ${nvcc_flags} -gencode arch=compute_90a,code=sm_90a)
  foreach(architecture ${cuda_architectures})
    list(APPEND nvcc_flags -gencode arch=compute_${architecture},code=sm_${architecture}
                           -gencode arch=compute_${architecture},code=compute_${architecture})
  endforeach()
  # The kernels of sm90/ use instructions that only sm_90a has. Without such a device a file of stand-ins is compiled in
  # their place.
  file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/csrc/attnpack/ops/cuda/kernels/*.cu
       ${CMAKE_CURRENT_SOURCE_DIR}/csrc/attnpack/ops/cuda/kernels/sm90/*.cu)
  if("90" IN_LIST cuda_architectures OR "90a" IN_LIST cuda_architectures)
    list(FILTER cuda_sources EXCLUDE REGEX "/without_sm90\\.cu$")
  else()
    list(FILTER cuda_sources EXCLUDE REGEX "/sm90/")
  endif()
  file(GLOB cuda_headers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/csrc/attnpack/ops/cuda/kernels/*.cuh
       ${CMAKE_CURRENT_SOURCE_DIR}/csrc/attnpack/ops/cuda/kernels/sm90/*.cuh
       ${CMAKE_CURRENT_SOURCE_DIR}/csrc/attnpack/ops/cuda/kernels/*.h ${CMAKE_CURRENT_SOURCE_DIR}/csrc/attnpack/ops/cuda/*.h
       ${CMAKE_CURRENT_SOURCE_DIR}/csrc/attnpack/core/*.h)
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/cuda)
  foreach(source ${cuda_sources})
    get_filename_component(name ${source} NAME_WE)
    set(source_flags ${nvcc_flags})
    if(source MATCHES "/sm90/")
      set(source_flags ${sm90_flags})
    endif()
    # A file that takes minutes is compiled in parts, which its lines "// part: <flags>" list.
    file(STRINGS ${source} parts REGEX "^// part: ")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})  # which are read now
    if(NOT parts)
      set(parts "// part:")
    endif()
    set(number 0)
    foreach(part ${parts})
      string(REGEX REPLACE "^// part: ?" "" part "${part}")
      separate_arguments(part)
      set(object ${PROJECT_BINARY_DIR}/cuda/${name}_${number}.o)
      math(EXPR number "${number} + 1")
      add_custom_command(OUTPUT ${object} DEPENDS ${source} ${cuda_headers} VERBATIM
        COMMAND ${ATTNPACK_NVCC} ${source_flags} ${part} -I ${CMAKE_CURRENT_SOURCE_DIR}/csrc -c ${source} -o ${object})
      list(APPEND cuda_objects ${object})
    endforeach()
  endforeach()
  # The one symbol that libattnpack_cuda takes from libattnpack is attnpack::set_cuda_kernels, so torch need not be
  # resolved here.
  set(cuda_library ${PROJECT_BINARY_DIR}/libattnpack_cuda.so)
  add_custom_command(OUTPUT ${cuda_library} DEPENDS ${cuda_objects} attnpack VERBATIM
    COMMAND ${ATTNPACK_NVCC} -shared -cudart static -ccbin ${CMAKE_CXX_COMPILER} -o ${cuda_library} ${cuda_objects}
            $<TARGET_FILE:attnpack> -Xlinker --allow-shlib-undefined -Xlinker -rpath=$ORIGIN)
  add_custom_target(attnpack_cuda ALL DEPENDS ${cuda_library})
  install(PROGRAMS ${cuda_library} DESTINATION lib)
endif()
