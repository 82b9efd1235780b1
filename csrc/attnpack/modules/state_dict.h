#pragma once

#include <torch/nn/module.h>

#include <attnpack/weights/safetensors.h>

#include <string>
#include <vector>

namespace attnpack {

// The names that a state dict lacks, and those that the module does not know.
struct LoadResult {
  std::vector<std::string> missing, unexpected;
};

// Parameters and buffers by name, not copied.
StateDict state_dict(const torch::nn::Module& module);

// Each parameter once, which is what an optimiser wants. LibTorch's parameters() names a shared parameter once per
// place, and a step would move it as often.
std::vector<at::Tensor> distinct_parameters(const torch::nn::Module& module);

// Makes parameters of `copy` one tensor where those of `original` are one. LibTorch's clone() makes one copy per place.
void tie_as(const torch::nn::Module& original, torch::nn::Module& copy);

// Parameters of `to` require gradients where those of the same name in `from` do.
void copy_requires_grad(const torch::nn::Module& from, torch::nn::Module& to);

// Copies tensors into the module by name, in the module's dtype and on its device; they may be the module's own or
// views of these. Everything is checked before the first write: it raises on a shape that differs, on complex numbers
// for real ones, on a sparse or quantised tensor, on a tensor or a module on meta, on a parameter whose elements share
// memory (expanded), and with strict on a name that is missing or not the module's.
LoadResult load_state_dict(torch::nn::Module& module, const StateDict& tensors, bool strict = true);

// Puts the tensors themselves in place of the module's parameters (any floating dtype, any device, meta too). Both
// sides then share storage and gradients. Checks as load_state_dict does; a given tensor may not be expanded either.
// Every parameter must belong to a module of attnpack, and keeps its requires_grad: a tensor with another one is
// detached first, so that the two sides share only the storage. A stored weight (ops/stored_linear.h) in the place of
// numbers freezes the whole module, which then has no gradients. A parameter that stands in several places stays one:
// it becomes the last of the tensors under its names.
LoadResult assign_state_dict(torch::nn::Module& module, const StateDict& tensors, bool strict = true);

}  // namespace attnpack
