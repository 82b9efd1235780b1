#include <attnpack/models/detail/hf_config.h>
#include <attnpack/models/detail/hf_configure.h>
#include <attnpack/models/detail/hf_families.h>

namespace attnpack {

namespace {
using Options = CausalLMOptions;
}

void configure_smollm3(const HfSettings& config, Options& o) {
  o.mlp_bias(config.is_on("mlp_bias")).activation(gated_activation(config, "silu"));
  const auto rotates = rotated_layers(config, o.num_layers());
  const auto size = window_size(config, std::nullopt);
  const bool used = config.is_on("use_sliding_window");
  set_windows(config, o, size, [&](int64_t layer) { return used && !rotates[layer]; });
  set_rotated_layers(o, [&](int64_t layer) { return rotates[layer]; });
}

void configure_granite(const HfSettings& config, Options& o) {
  o.mlp_bias(config.is_on("mlp_bias")).activation(gated_activation(config, "silu"));
  set_multipliers(config, o);
}

void configure_glm4(const HfSettings& config, Options& o) {
  o.head_dim(config.size("head_dim", 128))
      .bias(config.is_on("attention_bias", true))
      .out_bias(false)
      .rope_interleaved(true)
      .layout("sandwich")
      .activation(gated_activation(config, "silu"));
  set_rotated_part(config, o, 0.5);
}

// Where some layers have windows, the others do not rotate.
void configure_exaone4(const HfSettings& config, Options& o) {
  o.bias(false).out_bias(false).layout("output").qk_norm(QkNorm(true).eps(o.eps()));
  o.activation(gated_activation(config, "silu"));
  const auto size = window_size(config, 4096);
  const bool listed = !config.get("layer_types").is_null();
  const int64_t every =
      listed || !size ? (config.get("sliding_window_pattern"), 1) : config.size("sliding_window_pattern", 4);
  set_windows(config, o, size, [=](int64_t layer) { return (layer + 1) % every != 0; });
  if (size) set_rotated_layers(o, [&](int64_t layer) { return slides(o, layer); });
}

void configure_olmo3(const HfSettings& config, Options& o) {
  o.layout("output").qk_norm(QkNorm(true).all_heads(true).eps(o.eps())).activation(gated_activation(config, "silu"));
  set_windows(config, o, window_size(config, 4096), [](int64_t layer) { return (layer + 1) % 4 != 0; });
  set_ropes_by_kind(o, hf_rope_by_kind(config, 5e5, 5e5));
}

void configure_ministral(const HfSettings& config, Options& o) {
  o.bias(false).out_bias(false).activation(gated_activation(config, "silu"));
  set_windows(config, o, window_size(config, 4096), [](int64_t) { return true; });
}

void configure_ministral3(const HfSettings& config, Options& o) {
  o.bias(false).out_bias(false).activation(gated_activation(config, "silu")).head_dim(config.size("head_dim", 128));
  if (const auto scale = log_query_scale(config)) o.scores(ScoreSettings().query_scale(*scale));
  set_window(config, o, window_size(config, std::nullopt));
}

void configure_seed_oss(const HfSettings& config, Options& o) {
  o.head_dim(config.size("head_dim", 128))
      .bias(config.is_on("attention_bias", true))
      .out_bias(config.is_on("attention_out_bias"))
      .mlp_bias(config.is_on("mlp_bias"))
      .activation(gated_activation(config, "silu"));
}

void configure_hunyuan(const HfSettings& config, Options& o) {
  config.check(config.is_on("use_qk_norm", true), "use_qk_norm = false in config.json is not supported: transformers ",
               "norms queries and keys whatever it says");
  o.qk_norm(QkNorm(true).eps(o.eps()).after_rope(true)).activation(gated_activation(config, "silu"));
}

void configure_ernie(const HfSettings& config, Options& o) {
  const bool bias = config.is_on("use_bias");
  o.head_dim(config.size("head_dim", 128))
      .bias(bias)
      .out_bias(bias)
      .mlp_bias(bias)
      .rope_interleaved(true)
      .activation(gated_activation(config, "silu"));
}

void configure_helium(const HfSettings& config, Options& o) {
  o.head_dim(config.size("head_dim", 128))
      .out_bias(false)
      .mlp_bias(config.is_on("mlp_bias"))
      .rope_interleaved(true)
      .activation(gated_activation(config, "silu"));
}

void configure_arcee(const HfSettings& config, Options& o) {
  o.mlp_bias(config.is_on("mlp_bias")).activation(plain_activation(config, "relu2"));
}

}  // namespace attnpack
