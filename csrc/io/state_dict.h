#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>
#include <vector>

namespace attnpack {

using StateDict = std::map<std::string, at::Tensor>;

struct LoadResult {
  std::vector<std::string> missing, unexpected;
};

// Parameters and buffers by name, not copied.
StateDict state_dict(const torch::nn::Module& module);

// Copies tensors into the module by name, in the module's dtype and on its device. Everything is checked before the
// first write: a shape that differs raises, and with strict a name that is missing or not the module's.
LoadResult load_state_dict(torch::nn::Module& module, const StateDict& tensors, bool strict = true);

// Puts the tensors themselves in place of the module's parameters (any dtype and device): both sides then share
// storage and gradients. Checks as above. Every parameter must belong to a module of attnpack.
LoadResult assign_state_dict(torch::nn::Module& module, const StateDict& tensors, bool strict = true);

}  // namespace attnpack
