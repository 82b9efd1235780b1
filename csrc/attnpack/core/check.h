#pragma once

#include <c10/util/Exception.h>

// Every error message names the argument, what it got, what it wants and the fix.
#define ATTNPACK_CHECK(condition, ...) TORCH_CHECK_VALUE(condition, "attnpack: ", __VA_ARGS__)
