#pragma once

#include <c10/util/Exception.h>

#include <attnpack/core/text.h>

// Every error message names the argument, what it got, what it wants and the fix. The second raises a TypeError.
#define ATTNPACK_CHECK(condition, ...) TORCH_CHECK_VALUE(condition, ::attnpack::text_of({"attnpack: ", __VA_ARGS__}))
#define ATTNPACK_CHECK_TYPE(condition, ...) \
  TORCH_CHECK_TYPE(condition, ::attnpack::text_of({"attnpack: ", __VA_ARGS__}))
