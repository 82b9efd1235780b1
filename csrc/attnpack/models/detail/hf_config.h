#pragma once

#include <attnpack/models/causal_lm.h>
#include <attnpack/models/detail/hf_parts.h>
#include <attnpack/models/detail/hf_settings.h>

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

// config.json of a Hugging Face checkpoint as options of CausalLM.
namespace attnpack {

// A family of models: how it differs from Llama, whose settings the options have already when `configure` is called.
struct HfFamily {
  const char* model_type;
  void (*configure)(const HfSettings& config, CausalLMOptions& options);
  HfParts parts = llama_parts;              // where its tensors go
  HfAliases aliases = {};                   // its names of Llama's settings
  double eps = 1e-6;                        // of the norms, where the configuration does not say
  bool tied = false;                        // the head is the embedding, where the configuration does not say
  std::set<std::string_view> honours = {};  // of what is refused elsewhere
  double rope_base = 10000;                 // where the configuration does not say
  bool rope_by_kind = false;                // layers with a window have frequencies of their own
  const char* base = "model.";              // the beginning that names in a file of the base model lack
  std::vector<const char*> ignores = {};    // what released files have and transformers does not use here
  std::vector<HfSize> sizes = {};           // where the configuration does not say
  bool needs_rope = false;                  // without RoPE settings transformers takes YaRN, with numbers of its own
};

constexpr int64_t kMostExperts = 4096;  // so that a lie costs little; DeepSeek-V3 has 256

// The families that can be read. A new one is a row of the table in hf_families.cpp; the functions of most rows stand
// in the files that hf_configure.h names.
const std::vector<HfFamily>& hf_families();

// The family of the configuration; raises for one that cannot be read.
const HfFamily& hf_family(const HfSettings& config);

// Raises for a setting that CausalLM does not have, by its name, and for one that nothing here reads.
// max_positions limits the configuration's own context.
CausalLMOptions hf_options(HfSettings& config, std::optional<int64_t> max_positions);

// Base and scaling of the rotation, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`
// (before).
struct HfRope {
  double base;
  std::optional<RopeScaling> scaling;
};
HfRope hf_rope(const HfSettings& config);
// The same where layers with a window have frequencies of their own, with the bases where the configuration has none.
struct HfRopeByKind {
  HfRope full, sliding;
};
HfRopeByKind hf_rope_by_kind(const HfSettings& config, double full_base, double sliding_base);
// A member of the object of the RoPE; null if it is absent.
const Json& hf_rope_member(const HfSettings& config, const char* name);
// The part of a head's dims that rotate; `usual` where the configuration does not say.
double hf_rotated_part(const HfSettings& config, double usual = 1);

}  // namespace attnpack
