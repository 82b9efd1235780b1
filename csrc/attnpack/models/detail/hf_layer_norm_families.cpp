#include <attnpack/models/detail/hf_config.h>
#include <attnpack/models/detail/hf_configure.h>
#include <attnpack/models/detail/hf_families.h>

namespace attnpack {

namespace {
using Options = CausalLMOptions;
}

// Attention and feed-forward in parallel; layers without a window do not rotate.
void configure_cohere2(const HfSettings& config, Options& o) {
  for (const char* name :
       {"layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
        "use_gated_activation", "use_parallel_block", "use_parallel_embedding", "use_qk_norm"})
    config.get(name);  // of released models; transformers reads none of them
  o.norm("layer_no_bias")
      .layout("parallel")
      .rope_interleaved(true)
      .logit_scale(config.number("logit_scale", 0.0625))
      .activation(gated_activation(config, "silu"));
  const auto every = config.size("sliding_window_pattern", 4);
  set_windows(config, o, window_size(config, 4096), [=](int64_t layer) { return (layer + 1) % every != 0; });
  set_rotated_layers(o, [&](int64_t layer) { return slides(o, layer); });
}

void configure_phi(const HfSettings& config, Options& o) {
  config.refuse_if_set("qk_layernorm");
  config.check(!o.tie_embeddings(), "tie_word_embeddings = true in config.json is not supported for a head with a bias",
               kOtherModel);
  o.norm("layer")
      .layout("parallel")
      .bias(true)
      .out_bias(true)
      .mlp_bias(true)
      .head_bias(true)
      .activation(plain_activation(config, "gelu_new"));
  set_rotated_part(config, o, 0.5);
}

void configure_gpt_neox(const HfSettings& config, Options& o) {
  config.get("is_decoder");
  const bool bias = config.is_on("attention_bias", true);
  o.num_kv_heads(o.num_heads())
      .norm("layer")
      .bias(bias)
      .out_bias(bias)
      .mlp_bias(true)
      .activation(plain_activation(config, "gelu"));
  if (config.is_on("use_parallel_residual", true)) o.layout("parallel_two");
  set_rotated_part(config, o, 0.25);
}

void configure_stablelm(const HfSettings& config, Options& o) {
  config.refuse_if_set("qk_layernorm");
  o.norm("layer").bias(config.is_on("use_qkv_bias")).out_bias(false).activation(gated_activation(config, "silu"));
  if (config.is_on("use_parallel_residual")) o.layout("parallel");
  set_rotated_part(config, o, 0.25);
}

}  // namespace attnpack
