# Finds ATTNPACK_TORCH_DIR, the folder of the torch to build against: as given, else by asking Python.
if(NOT ATTNPACK_TORCH_DIR)
  find_program(ATTNPACK_PYTHON_PROGRAM NAMES python3 python)
  if(Python_EXECUTABLE)
    set(ATTNPACK_PYTHON_PROGRAM ${Python_EXECUTABLE})
  endif()
  if(ATTNPACK_PYTHON_PROGRAM)
    execute_process(
      COMMAND ${ATTNPACK_PYTHON_PROGRAM} -c
              "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE ATTNPACK_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
if(NOT EXISTS "${ATTNPACK_TORCH_DIR}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "attnpack: no torch found (looked in '${ATTNPACK_TORCH_DIR}'). Install one (pip install torch) or "
                      "pass -DATTNPACK_TORCH_DIR=<folder of torch or LibTorch>.")
endif()
