#pragma once

// The one place that includes Catch2, version 2 (Debian's) or 3. torch's logging macros share names with some of
// Catch2's (CHECK), so torch's are included first and undefined.
#include <c10/util/Logging.h>

#undef CHECK

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
