#pragma once

#include <attnpack/weights/detail/json.h>

#include <string_view>

// Numbers in JSON's grammar as values.
namespace attnpack {

// Raises if the number is too large. One too small is 0.
double read_json_double(std::string_view text);

// An int64 or uint64 if one holds the integer, else a double, as "-0" is.
Json read_json_integer(std::string_view text);

}  // namespace attnpack
