# Finds nlohmann/json, headers that only the build needs, as the target nlohmann_json::nlohmann_json: that of the program
# around, else what ATTNPACK_JSON_DIR names, else a package for CMake (Debian's, conda's), else PyPI's: beside torch, where
# Python finds it, or from the package index.

# attnpack_copy_json(folder of the package nlohmann-json)
function(attnpack_copy_json)
  file(GLOB_RECURSE headers RELATIVE "${ARGV0}/include" "${ARGV0}/include/nlohmann/*.hpp")
  foreach(header ${headers})
    configure_file(${ARGV0}/include/${header} ${attnpack_json_dir}/${header} COPYONLY)
  endforeach()
endfunction()

if(NOT TARGET nlohmann_json::nlohmann_json AND NOT ATTNPACK_JSON_DIR)
  find_package(nlohmann_json 3.10 QUIET)
endif()
if(NOT TARGET nlohmann_json::nlohmann_json)
  set(attnpack_json_dir "${ATTNPACK_JSON_DIR}")
  if(NOT ATTNPACK_JSON_DIR)
    # PyPI's may lie in pip's build environment, which has another name each time and is gone after the build. A copy
    # keeps the build tree whole, and its commands alike.
    set(attnpack_json_dir ${PROJECT_BINARY_DIR}/nlohmann_json)
    if(Python_EXECUTABLE)
      execute_process(
        COMMAND ${Python_EXECUTABLE} -c
                "import importlib.util as u; print(u.find_spec('nlohmann_json').submodule_search_locations[0])"
        OUTPUT_VARIABLE attnpack_json_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
    get_filename_component(attnpack_site_packages ${ATTNPACK_TORCH_DIR} DIRECTORY)
    attnpack_copy_json(${attnpack_site_packages}/nlohmann_json)
    attnpack_copy_json(${attnpack_json_package})
    if(NOT EXISTS ${attnpack_json_dir}/nlohmann/json.hpp AND Python_EXECUTABLE)
      message(STATUS "nlohmann/json: asking the package index")
      execute_process(COMMAND ${Python_EXECUTABLE} -m pip install --quiet --disable-pip-version-check --no-deps
                              --target ${PROJECT_BINARY_DIR}/packages nlohmann-json OUTPUT_QUIET ERROR_QUIET)
      attnpack_copy_json(${PROJECT_BINARY_DIR}/packages/nlohmann_json)
    endif()
  endif()
  if(NOT EXISTS "${attnpack_json_dir}/nlohmann/json.hpp")
    message(FATAL_ERROR "attnpack: no nlohmann/json.hpp found (ATTNPACK_JSON_DIR is '${ATTNPACK_JSON_DIR}'). Install it "
                        "(pip install nlohmann-json, or apt-get install nlohmann-json3-dev), or pass "
                        "-DATTNPACK_JSON_DIR=<folder that has nlohmann/json.hpp>.")
  endif()
  add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
  set_target_properties(nlohmann_json::nlohmann_json PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${attnpack_json_dir}")
endif()
get_target_property(attnpack_json_dir nlohmann_json::nlohmann_json INTERFACE_INCLUDE_DIRECTORIES)
message(STATUS "nlohmann/json: ${attnpack_json_dir}")
