#include <algorithm>

#include <attnpack/models/detail/hf_config.h>

namespace attnpack {

namespace {

void configure_llama(const HfSettings& config, CausalLMOptions& options) {
  options.mlp_bias(config.is_set("mlp_bias"));
}

void configure_mistral(const HfSettings& config, CausalLMOptions& options) {
  options.bias(false).out_bias(false).window(hf_window(config, true, 0, options.max_positions()));
}

std::optional<Window> qwen_window(const HfSettings& config, const CausalLMOptions& options) {
  const auto* first = config.get("max_window_layers").as<int64_t>();
  return hf_window(config, config.is_set("use_sliding_window"), first ? *first : 28, options.max_positions());
}

void configure_qwen2(const HfSettings& config, CausalLMOptions& options) {
  options.bias(true).out_bias(false).window(qwen_window(config, options));
}

void configure_qwen3(const HfSettings& config, CausalLMOptions& options) {
  options.head_dim(config.size("head_dim", 128)).qk_norm(true).window(qwen_window(config, options));
}

// A setting that changes the mathematics, and the number that means "off"; null and absent do so too.
struct Unsupported {
  const char* name;
  std::optional<double> off;
};
constexpr Unsupported kUnsupported[] = {
    {"attn_logit_softcapping", 0},
    {"final_logit_softcapping", 0},
    {"attention_dropout", 0},
    {"quantization_config", std::nullopt},
    {"partial_rotary_factor", 1},
    {"use_bidirectional_attention", 0},
    {"is_causal", 1},
};

const HfFamily& find_family(const HfSettings& config) {
  const auto& families = hf_families();
  const auto found = std::find_if(families.begin(), families.end(),
                                  [&](const auto& family) { return family.model_type == config.model_type(); });
  std::string known;
  for (const auto& family : families) (known += known.empty() ? "" : ", ") += family.model_type;
  config.check(found != families.end(), "model_type ", brief(shown(config.get("model_type"))),
               " is not supported; from_hf reads ", known);
  return *found;
}

void check_supported(const HfSettings& config) {
  for (const auto& [name, off] : kUnsupported) {
    const auto& value = config.get(name);
    config.check(value.is_null() || (off && number_in(value) == off), name, " = ", brief(shown(value)),
                 " in config.json is not supported yet");
  }
  const auto& activation = config.get("hidden_act");
  const auto* word = activation.as<std::string>();
  config.check(activation.is_null() || (word && *word == "silu"), "hidden_act ", brief(shown(activation)),
               " in config.json is not supported; it must be 'silu'");
}

}  // namespace

const std::vector<HfFamily>& hf_families() {
  static const std::vector<HfFamily> families = {
      {"llama", configure_llama},
      {"mistral", configure_mistral},
      {"qwen2", configure_qwen2},
      {"qwen3", configure_qwen3},
  };
  return families;
}

CausalLMOptions hf_options(const HfSettings& config, std::optional<int64_t> max_positions) {
  const auto& family = find_family(config);
  check_supported(config);
  const auto heads = config.size("num_attention_heads"), kv_heads = config.size("num_key_value_heads", heads);
  config.check(heads % kv_heads == 0, "num_attention_heads ", heads,
               " in config.json is no multiple of num_key_value_heads ", kv_heads,
               "; a Hugging Face checkpoint has groups of one size");
  const auto width = config.size("hidden_size"), positions = config.size("max_position_embeddings");
  const auto rope = hf_rope(config);
  const bool bias = config.is_set("attention_bias");
  CausalLMOptions options(config.size("vocab_size"), width, config.size("num_hidden_layers"), heads);
  options.num_kv_heads(kv_heads)
      .hidden_dim(config.size("intermediate_size"))
      .max_positions(std::min(positions, max_positions.value_or(positions)))
      .rope_base(rope.base)
      .rope_scaling(rope.scaling)
      .eps(config.number("rms_norm_eps", 1e-6))
      .tie_embeddings(config.is_set("tie_word_embeddings"))
      .bias(bias)
      .out_bias(bias);
  // A family may have heads of a size of its own, so the division is not checked here.
  if (!config.get("head_dim").is_null()) {
    options.head_dim(config.size("head_dim"));
  } else if (width >= heads) {
    options.head_dim(width / heads);
  }
  family.configure(config, options);
  config.check(options.head_dim().has_value(), "num_attention_heads ", heads,
               " in config.json is more than hidden_size ", width, ", and there is no head_dim");
  return options;
}

}  // namespace attnpack
