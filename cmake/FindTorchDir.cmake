# Finds ATTNPACK_TORCH_DIR, the folder of the torch to build against: as given, else by asking Python.
if(NOT ATTNPACK_TORCH_DIR)
  include(${CMAKE_CURRENT_LIST_DIR}/AskPythonForTorch.cmake)
  set(ATTNPACK_TORCH_DIR ${ATTNPACK_PYTHONS_TORCH})
endif()
if(NOT EXISTS "${ATTNPACK_TORCH_DIR}/lib/libtorch_cpu${CMAKE_SHARED_LIBRARY_SUFFIX}")
  message(FATAL_ERROR "attnpack: no torch found (looked in '${ATTNPACK_TORCH_DIR}'). Install one (pip install torch) or "
                      "pass -DATTNPACK_TORCH_DIR=<folder of torch or LibTorch>.")
endif()
