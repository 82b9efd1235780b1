#pragma once

#include <attnpack/models/detail/hf_config.h>

#include <vector>

namespace attnpack {

// The rows of families with recurrent layers, for the table of hf_families.cpp.
std::vector<HfFamily> hf_hybrid_families();

}  // namespace attnpack
