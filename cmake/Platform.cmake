# Checks that attnpack can build here. Each check stops with the same sentence and says what was found instead.
set(ATTNPACK_NEEDS "attnpack: Linux x86-64 (ARM compiles), Python >= 3.11, torch >= 2.11")

if(NOT "${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}" MATCHES
   "^(Linux (x86_64|amd64|AMD64|aarch64|arm64)|Darwin (arm64|aarch64))$")
  message(FATAL_ERROR "${ATTNPACK_NEEDS}; this is ${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}.")
endif()

# The folder of a library in its own RUNPATH, and the option of OpenMP. Apple's clang knows it only behind -Xclang.
set(ATTNPACK_ORIGIN "$ORIGIN")
set(ATTNPACK_OPENMP -fopenmp)
if(CMAKE_SYSTEM_NAME STREQUAL "Darwin")
  set(ATTNPACK_ORIGIN "@loader_path")
  set(ATTNPACK_OPENMP "SHELL:-Xclang -fopenmp")
endif()

# attnpack_require_openmp(): ATen/Parallel.h includes omp.h, and without it silently runs serial. torch's wheels for
# macOS bring it beside their own headers.
function(attnpack_require_openmp)
  if(APPLE)
    if(NOT EXISTS "${ATTNPACK_TORCH_DIR}/include/omp.h")
      message(FATAL_ERROR "attnpack: ${ATTNPACK_TORCH_DIR}/include has no omp.h, which the library's threads need: use "
                          "the torch of a wheel for macOS.")
    endif()
    return()
  endif()
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS -fopenmp)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  check_cxx_source_compiles("#include <omp.h>
    int threads() { return omp_get_max_threads(); }" ATTNPACK_HAS_OMP_H)
  if(NOT ATTNPACK_HAS_OMP_H)
    message(FATAL_ERROR "attnpack: ${CMAKE_CXX_COMPILER} finds no omp.h, which the library's threads need: install it "
                        "(for clang++ apt-get install libomp-dev), or pass -DCMAKE_CXX_COMPILER=g++. A program that "
                        "uses the library may be compiled with either.")
  endif()
endfunction()

# attnpack_require(<what> <version found> <version wanted>)
function(attnpack_require what found wanted)
  if(found VERSION_LESS wanted)
    message(FATAL_ERROR "${ATTNPACK_NEEDS}; this is ${what} ${found}.")
  endif()
endfunction()
