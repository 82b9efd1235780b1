#include <attnpack/models/detail/hf_config.h>

#include <algorithm>
#include <set>
#include <string_view>

namespace attnpack {

namespace {

constexpr int64_t kMostLayers = 100'000;  // so that a lie costs little

// A setting that changes the mathematics, and the number that means "off"; null and absent do so too.
struct Unsupported {
  const char* name;
  std::optional<double> off;
};
constexpr Unsupported kUnsupported[] = {
    {"attn_logit_softcapping", 0},
    {"final_logit_softcapping", 0},
    {"partial_rotary_factor", 1},
    {"use_bidirectional_attention", 0},
    {"is_causal", 1},
};

// honoured: the settings that the family reads.
void check_supported(const HfSettings& config, const std::set<std::string_view>& honoured) {
  for (const auto& [name, off] : kUnsupported) {
    const auto& value = config.get(name);
    if (honoured.count(name)) continue;
    config.check(value.is_null() || (off && number_in(value) == off), name, " = ", quoted(value),
                 " in config.json is not supported yet", kOtherModel);
  }
}

void check_has_rope(const HfSettings& config, const HfFamily& family) {
  config.check(!family.needs_rope || !config.get("rope_parameters").is_null() || !config.get("rope_scaling").is_null(),
               "its configuration has no rope_parameters, for which transformers takes YaRN with the numbers of ",
               config.model_type(), ": write them into config.json");
}

// The settings that all families name alike.
CausalLMOptions usual_options(const HfSettings& config, const HfFamily& family, std::optional<int64_t> max_positions) {
  const auto heads = config.size("num_attention_heads"), kv_heads = config.size("num_key_value_heads", heads);
  config.check(heads % kv_heads == 0, "num_attention_heads ", heads,
               " in config.json is no multiple of num_key_value_heads ", kv_heads,
               "; a Hugging Face checkpoint has groups of one size");
  const bool falcon = std::string_view(family.model_type) == "falcon";
  const auto width = config.size("hidden_size"), layers = config.size("num_hidden_layers");
  const auto positions = config.size("max_position_embeddings", falcon ? std::make_optional(2048) : std::nullopt);
  config.check(layers <= kMostLayers, "its configuration asks for ", layers, " layers, ", kMostLayers, " is the most; ",
               kGetAgain);
  const bool own_names = !family.aliases.empty();  // whose width inside is usually four times that outside
  const bool bias = config.is_on("attention_bias");
  CausalLMOptions options(config.size("vocab_size"), width, layers, heads);
  options.num_kv_heads(kv_heads)
      .hidden_dim(config.size("intermediate_size", own_names ? std::make_optional(4 * width) : std::nullopt))
      .max_positions(std::min(positions, max_positions.value_or(positions)))
      .eps(config.number("rms_norm_eps", family.eps))
      .tie_embeddings(config.is_on("tie_word_embeddings", family.tied))
      .bias(bias)
      .out_bias(bias);
  // A family may have heads of a size of its own, so the division is not checked here. Those of latent attention follow
  // from other settings.
  if (!config.get("head_dim").is_null() && !config.has("qk_rope_head_dim")) {
    options.head_dim(config.size("head_dim"));
  } else if (width >= heads) {
    options.head_dim(width / heads);
  }
  return options;
}

}  // namespace

const HfFamily& hf_family(const HfSettings& config) {
  const auto& families = hf_families();
  const auto found = std::find_if(families.begin(), families.end(),
                                  [&](const auto& family) { return family.model_type == config.model_type(); });
  std::string known;
  for (const auto& family : families) (known += known.empty() ? "" : ", ") += family.model_type;
  known += ", and the language model of ";
  for (const auto model : kMultimodal) (known += model == kMultimodal[0] ? "" : ", ") += model;
  config.check(found != families.end(), "model_type ", quoted(config.get("model_type")),
               " is not supported; from_hf reads ", known);
  return *found;
}

CausalLMOptions hf_options(HfSettings& config, std::optional<int64_t> max_positions) {
  const auto& family = hf_family(config);
  config.set_aliases(family.aliases);
  config.fill_in(family.sizes);
  check_supported(config, family.honours);
  auto options = usual_options(config, family, max_positions);
  if (!family.rope_by_kind) {
    const auto rope = hf_rope(config);
    check_has_rope(config, family);
    options.rope_base(rope.base).rope_scaling(rope.scaling);
  }
  family.configure(config, options);
  config.check(options.latent() || options.head_dim().has_value(), "num_attention_heads ", options.num_heads(),
               " in config.json is more than hidden_size ", options.embed_dim(), ", and there is no head_dim");
  for (const char* name : family.ignores) config.get(name);
  config.check_all_read();
  return options;
}

}  // namespace attnpack
