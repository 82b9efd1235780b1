#pragma once

#include <c10/util/Exception.h>

// One form for every complaint: the argument, what it got, what it wants, the fix.
#define ATTNPACK_CHECK(condition, ...) TORCH_CHECK_VALUE(condition, "attnpack: ", __VA_ARGS__)
