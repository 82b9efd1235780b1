#pragma once

#include <attnpack/models/causal_lm.h>
#include <attnpack/modules/state_dict.h>

#include <optional>
#include <string_view>

// Shared by the functions that load a model from files.
namespace attnpack {

inline constexpr const char* kLoadAgain = "get the checkpoint again, or give another";

// Raises for options that no model can have.
void check_load_options(at::ScalarType dtype, at::Device device, const std::optional<int64_t>& max_positions);

// A model without numbers.
CausalLM empty_model(CausalLMOptions options, at::ScalarType dtype);

// Whether the weight of a table or of a linear layer of that name may be stored in blocks. Latent attention multiplies
// by parts of kv_b_proj, and compressed attention by groups of o_a_proj: these stay numbers.
bool may_be_stored(std::string_view layer, bool is_table);

// A tensor without numbers for a parameter.
at::Tensor empty_weight(const at::Tensor& parameter, at::ScalarType dtype, at::Device device);

// Gives the model, which has no numbers, its weights: those that are there, and for the others what checkpoint.read
// puts into a tensor, one by one. It is then in evaluation mode.
template <typename Checkpoint>
void read_weights(CausalLMImpl& model, StateDict weights, at::ScalarType dtype, at::Device device,
                  const Checkpoint& checkpoint) {
  for (const auto& [name, parameter] : state_dict(model)) {
    if (weights.count(name)) continue;
    const auto weight = empty_weight(parameter, dtype, device);
    checkpoint.read(name, weight);
    weights[name] = weight;
  }
  assign_state_dict(model, weights);
  model.eval();
}

}  // namespace attnpack
