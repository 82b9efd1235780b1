# Checks that attnpack can build here. Each check stops with the same sentence and says what was found instead.
set(ATTNPACK_NEEDS "attnpack: Linux x86-64 (ARM compiles), Python >= 3.11, torch >= 2.11")

if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64|aarch64|arm64)$")
  message(FATAL_ERROR "${ATTNPACK_NEEDS}; this is ${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}.")
endif()

# attnpack_require(<what> <version found> <version wanted>)
function(attnpack_require what found wanted)
  if(found VERSION_LESS wanted)
    message(FATAL_ERROR "${ATTNPACK_NEEDS}; this is ${what} ${found}.")
  endif()
endfunction()
