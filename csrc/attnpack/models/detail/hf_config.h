#pragma once

#include <attnpack/models/causal_lm.h>
#include <attnpack/models/detail/hf_settings.h>

#include <optional>
#include <string>
#include <vector>

// config.json of a Hugging Face checkpoint as options of CausalLM.
namespace attnpack {

// A family of models: how it differs from Llama, whose settings the options have already.
struct HfFamily {
  const char* model_type;
  void (*configure)(const HfSettings& config, CausalLMOptions& options);
};

// The families that can be read. A new one is a row of the table in hf_families.cpp.
const std::vector<HfFamily>& hf_families();

// Raises for a setting that CausalLM does not have, by its name. max_positions limits the configuration's own context.
CausalLMOptions hf_options(const HfSettings& config, std::optional<int64_t> max_positions);

// Base and scaling of the rotation, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`
// (before).
struct HfRope {
  double base;
  std::optional<RopeScaling> scaling;
};
HfRope hf_rope(const HfSettings& config);

// The window of every layer: (W - 1, 0) for a sliding_window of W tokens, the token itself included. `used`: the family
// uses the setting; without layer_types the layers from first_layer on slide. Raises if only some layers have a window
// that is shorter than the context.
std::optional<Window> hf_window(const HfSettings& config, bool used, int64_t first_layer, int64_t max_positions);

}  // namespace attnpack
