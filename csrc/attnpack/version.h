#pragma once

// The one place that says the version: CMake, setup.py and attnpack.__version__ read it.
#define ATTNPACK_VERSION "0.1.0"
