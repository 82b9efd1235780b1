#pragma once

#include <attnpack/models/detail/hf_config.h>

#include <vector>

namespace attnpack {

// Layers of Mamba-2 where layer_types says so, in all where it is absent; sizes by the names that Bamba and Granite 4
// share.
void set_mamba_layers(const HfSettings& config, CausalLMOptions& options);

// The rows of families with recurrent layers, for the table of hf_families.cpp.
std::vector<HfFamily> hf_hybrid_families();

}  // namespace attnpack
