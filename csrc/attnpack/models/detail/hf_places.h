#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/models/detail/hf_parts.h>

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Shared by the families when they say where the parts of a stored tensor go.
namespace attnpack {

// "model.layers.3.", "mlp.c_fc", "weight": a name as a layer, a module in it and a parameter.
struct HfPlace {
  std::string layer, module, parameter;
};

// Names of modules, theirs and ours.
using HfNames = std::initializer_list<std::pair<std::string_view, const char*>>;

// The place that a stored name says, if the names of layers begin with `prefix`. Outside of layers `layer` is empty.
HfPlace place_of(const std::string& name, std::string_view prefix);

// The name of a module's tensor in the layer of `place`.
std::string joined(const HfPlace& place, const std::string& module);

// The tensor as it is, under that name.
std::vector<HfPart> whole(const std::string& name);

// The module by its new name, or the tensor as it is.
std::vector<HfPart> renamed(const std::string& name, const HfPlace& place, const HfNames& names);

// The first (0) or the second (1) half of the rows.
at::Tensor half_of_rows(const at::Tensor& x, int64_t which);

// Rows of a gate, then of up, as two modules in `module`.
std::vector<HfPart> gate_and_up(const HfPlace& place, const std::string& module);

// A tensor [experts, out, in] (or [experts, in, out], `transposed`) of all experts as a part for each: down_proj, or
// gate_proj and then up_proj, in halves of the rows.
std::vector<HfPart> expert_parts(const HfPlace& place, int64_t num_experts, bool down, bool transposed = false);

}  // namespace attnpack
