# Imported targets for the torch in ATTNPACK_TORCH_DIR (the folder of the torch package or of a LibTorch download):
# attnpack::torch and, if torch has a Python part, attnpack::torch_python. Sets ATTNPACK_TORCH_VERSION, which is "0" if
# it cannot be read. The build and attnpackConfig.cmake use this file. find_package(Torch) would not do: it fails for a
# CUDA torch without a CUDA toolkit, which is what a plain "pip install torch" gives.
set(ATTNPACK_TORCH_VERSION 0)
if(EXISTS "${ATTNPACK_TORCH_DIR}/include/torch/headeronly/version.h")
  file(STRINGS "${ATTNPACK_TORCH_DIR}/include/torch/headeronly/version.h" attnpack_lines
       REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX MATCHALL "[0-9]+" attnpack_numbers "${attnpack_lines}")
  list(JOIN attnpack_numbers "." ATTNPACK_TORCH_VERSION)
endif()

if(NOT TARGET attnpack::torch)
  foreach(name torch torch_cpu c10)
    add_library(attnpack::${name}_lib SHARED IMPORTED)
    set_target_properties(attnpack::${name}_lib PROPERTIES
      IMPORTED_LOCATION "${ATTNPACK_TORCH_DIR}/lib/lib${name}${CMAKE_SHARED_LIBRARY_SUFFIX}")
  endforeach()
  add_library(attnpack::torch INTERFACE IMPORTED)
  set_target_properties(attnpack::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${ATTNPACK_TORCH_DIR}/include;${ATTNPACK_TORCH_DIR}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "attnpack::torch_lib;attnpack::torch_cpu_lib;attnpack::c10_lib")
  if(NOT APPLE)
    # libtorch.so has no symbols of its own, but it loads CUDA's libraries: keep it where as-needed is the default. The
    # loader, not the linker, finds what those libraries need in turn.
    set_target_properties(attnpack::torch PROPERTIES
      INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed;LINKER:--allow-shlib-undefined")
  endif()
  set(attnpack_torch_python "${ATTNPACK_TORCH_DIR}/lib/libtorch_python${CMAKE_SHARED_LIBRARY_SUFFIX}")
  if(EXISTS "${attnpack_torch_python}")
    add_library(attnpack::torch_python SHARED IMPORTED)
    set_target_properties(attnpack::torch_python PROPERTIES
      IMPORTED_LOCATION "${attnpack_torch_python}" INTERFACE_LINK_LIBRARIES attnpack::torch)
  endif()
endif()
