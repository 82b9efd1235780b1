#pragma once

#include <attnpack/models/causal_lm.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

// Checks of a checkpoint's sizes before a model is built: a file may lie.
namespace attnpack {

using Shapes = std::map<std::string, std::vector<uint64_t>>;

// Raises for sizes that no tensor of the checkpoint has, and that would cost much before shapes are compared.
void check_sizes(const std::string& path, uint64_t num_tensors, uint64_t num_layers, uint64_t heads, uint64_t head_dim);

// The shapes of the tensors of the CausalLM that the options describe, by name. Raises unless the checkpoint at `path`
// has exactly these tensors. It builds one layer of the model: a configuration that lies may ask for more layers than
// fit in memory.
Shapes check_checkpoint_tensors(const std::string& path, const Shapes& found, const CausalLMOptions& options);

}  // namespace attnpack
