# Sets ATTNPACK_PYTHONS_TORCH, the folder of the torch that Python would import; empty where there is none. The build
# and attnpackConfig.cmake use this file.
find_program(ATTNPACK_PYTHON_PROGRAM NAMES python3 python)
if(Python_EXECUTABLE)
  set(ATTNPACK_PYTHON_PROGRAM ${Python_EXECUTABLE})
endif()
set(ATTNPACK_PYTHONS_TORCH "")
if(ATTNPACK_PYTHON_PROGRAM)
  execute_process(
    COMMAND ${ATTNPACK_PYTHON_PROGRAM} -c
            "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE ATTNPACK_PYTHONS_TORCH OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
