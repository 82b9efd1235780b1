#pragma once

// The one place that includes Catch2, version 2 (Debian's) or 3. torch's logging macros have the same names as some of
// Catch2's (CHECK), so they come first and give way.
#include <c10/util/Logging.h>

#undef CHECK

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
