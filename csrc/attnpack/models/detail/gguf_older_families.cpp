#include <attnpack/models/detail/gguf_configure.h>
#include <attnpack/models/detail/hf_families.h>

#include <cmath>

namespace attnpack {

namespace {
using Options = CausalLMOptions;

// Norms are stored as 1 + weight. The largest model, with that many layers, scales by the mean width of a head.
void set_gemma(Options& o, int64_t largest) {
  const auto width = o.num_layers() == largest ? o.embed_dim() / o.num_heads() : *o.head_dim();
  o.layout("sandwich")
      .activation("geglu_tanh")
      .embed_scale(std::pow(static_cast<double>(o.embed_dim()), 0.5))
      .scores(ScoreSettings().scale(std::pow(static_cast<double>(width), -0.5)));
}

void configure_gemma2(const GgufSettings& file, Options& o) {
  set_gemma(o, 46);
  o.scores()->softcap(file.number("attn_logit_softcapping", 50));
  o.final_softcap(file.number("final_logit_softcapping", 30));
  set_windows(file, o, file.size("attention.sliding_window", 4096), 2);
}

void configure_gemma3(const GgufSettings& file, Options& o) {
  set_gemma(o, 62);
  if (file.is_set("final_logit_softcapping")) o.final_softcap(file.number("final_logit_softcapping"));
  if (!set_windows_in_turns(file, o, 6)) return;
  const auto base = file.number("rope.freq_base_swa", 10000);
  const auto scaling = o.rope_scaling();
  o.rope_scaling(std::nullopt);
  for (int64_t i = 0; i < o.num_layers(); ++i) {
    auto& layer = o.layer_settings()[i];
    if (slides(o, i))
      layer.rope_base(base);
    else
      layer.rope_scaling(scaling);
  }
}

void configure_phi3(const GgufSettings& file, Options& o) {
  set_rotated_part(file, o);
  const auto rotated = file.size("rope.dimension_count", *o.head_dim());
  const auto near = file.vector("rope_factors_short.weight", rotated / 2);
  const auto far = file.vector("rope_factors_long.weight", rotated / 2);
  if (!far) return file.refuse({"rope.scaling.attn_factor"}, {1});
  o.rope_scaling(RopeScaling()
                     .rope_type("longrope")
                     .short_factor(near.value_or(*far))
                     .long_factor(*far)
                     .original_max_position_embeddings(file.size("rope.scaling.original_context_length"))
                     .attention_factor(file.number("rope.scaling.attn_factor", 1)));
}

void configure_falcon(const GgufSettings& file, Options& o) {
  const auto* key = "use_parallel_residual";
  file.check(file.is_usual(key, true), file.full(key), " is ", quoted(file.get(key)), ", wants True or no such key",
             kOtherModel);
  const bool two = file.has_shape("model.layers.0.post_attention_layernorm.weight");
  o.layout(two ? "parallel_two" : "parallel").activation("gelu");
}

void configure_starcoder2(const GgufSettings&, Options& o) { o.activation("gelu_tanh"); }

void configure_gpt2(const GgufSettings&, Options& o) { o.position_embedding("learned").activation("gelu_tanh"); }

// Llama, or Mixtral.
void configure_llama(const GgufSettings& file, Options& o) {
  if (file.is_set("expert_count")) o.experts(wide_experts(file));
}

void configure_qwen3_experts(const GgufSettings& file, Options& o) { o.experts(plain_experts(file, true)); }

void configure_gpt_oss(const GgufSettings& file, Options& o) {
  o.scores(ScoreSettings().sinks(true))
      .experts(plain_experts(file, true).gate_bias(true).bias(true).activation("clamped_swiglu"))
      .mlp_bias(false);
  set_windows(file, o, file.size("attention.sliding_window"), 2);
  if (o.rope_scaling()) o.rope_scaling()->truncate(false);
}

// DeepSeek-V2 and V3, and Mistral's models of their kind, whose scores grow with the position.
void configure_deepseek2(const GgufSettings& file, Options& o) {
  set_latent(file, o);
  o.rope_interleaved(true);
  if (file.is_set("attention.temperature_scale"))
    o.latent()->query_scale(QueryScale()
                                .type("log")
                                .llama_4_scaling_beta(file.number("attention.temperature_scale"))
                                .original_max_position_embeddings(file.size("attention.temperature_length")));
  if (auto& scaling = o.rope_scaling()) {
    // The file holds 0.1 * mscale_all_dim, and llama.cpp takes mscale to be the same number.
    const auto* key = "rope.scaling.yarn_log_multiplier";
    scaling->attention_factor(1.0);
    if (file.is_set(key)) scaling->mscale_all_dim(file.number(key) / 0.1);
  }
  if (!file.is_set("expert_count")) return;
  o.experts(grouped_experts(file, false, kSoftmax));
  set_first_dense(file, o);
}

GgufRecipes latent_recipes(const GgufSettings&) { return {latent_halves()}; }

GgufFamily deepseek2(const char* architecture) {
  return {.architecture = architecture,
          .configure = configure_deepseek2,
          .names = joined({expert_names(), shared_names(), correction_names(), latent_names()}),
          .settings = {"expert_count", "attention.temperature_scale", "attention.value_length", "rope.dimension_count",
                       "rope.scaling.yarn_log_multiplier"},
          .recipes = latent_recipes};
}

}  // namespace

void set_rotated_part(const GgufSettings& file, Options& o) {
  const auto dims = file.size("rope.dimension_count", *o.head_dim());
  if (dims != *o.head_dim()) o.scores(o.scores().value_or(ScoreSettings()).rope_dim(dims));
}

std::vector<bool> sliding_layers(const GgufSettings& file, int64_t layers, int64_t period) {
  const auto* key = "attention.sliding_window_pattern";
  if (const auto listed = file.bools_by_layer(key, layers)) return *listed;
  const auto every = file.size(key, period);
  std::vector<bool> slides(layers);
  for (int64_t i = 0; i < layers; ++i) slides[i] = i % every != every - 1;
  return slides;
}

void set_windows(const GgufSettings& file, Options& o, int64_t width, int64_t period) {
  const auto slides = sliding_layers(file, o.num_layers(), period);
  auto& layers = layers_of(o);
  for (int64_t i = 0; i < o.num_layers(); ++i) layers[i].window(slides[i] ? Window{width - 1, 0} : Window{-1, -1});
}

bool set_windows_in_turns(const GgufSettings& file, Options& o, int64_t period) {
  const auto width = file.size_if_set("attention.sliding_window");
  if (width) set_windows(file, o, *width, period);
  return width.has_value();
}

// Files with attn_k_b and attn_v_b give the widths of the absorbed heads as key_length and value_length, and those of
// the heads themselves as key_length_mla and value_length_mla.
void set_latent(const GgufSettings& file, Options& o) {
  const auto rotated = file.size("rope.dimension_count");
  const auto key_dim = file.size("attention.key_length_mla", *o.head_dim());
  o.latent(MultiHeadLatentAttentionOptions(1, 1)
               .kv_lora_rank(file.size("attention.kv_lora_rank"))
               .q_lora_rank(file.size_if_set("attention.q_lora_rank"))
               .qk_nope_head_dim(key_dim - rotated)
               .qk_rope_head_dim(rotated)
               .v_head_dim(file.size("attention.value_length_mla", file.size("attention.value_length", key_dim))))
      .num_kv_heads(std::nullopt)
      .head_dim(std::nullopt)
      .out_bias(std::nullopt);
}

GgufFamilies gguf_older_families() {
  return {
      {.architecture = "llama",
       .configure = configure_llama,
       .names = expert_names(),
       .interleaved = true,
       .settings = {"expert_count"}},
      {.architecture = "qwen2"},
      {.architecture = "qwen3"},
      {.architecture = "qwen3moe",
       .configure = configure_qwen3_experts,
       .names = expert_names(),
       .settings = {"expert_count"}},
      {.architecture = "gemma2",
       .configure = configure_gemma2,
       .names = sandwich_names(),
       .settings = {"attn_logit_softcapping", "final_logit_softcapping"},
       .windows = true},
      {.architecture = "gemma3",
       .configure = configure_gemma3,
       .names = sandwich_names(),
       .settings = {"final_logit_softcapping", "rope.freq_base_swa"},
       .windows = true},
      {.architecture = "phi3",
       .configure = configure_phi3,
       .fused = {{"ffn_up", {"mlp.gate_proj", "mlp.up_proj"}}},
       .settings = {"rope.dimension_count", "rope.scaling.attn_factor"}},
      {.architecture = "starcoder2", .configure = configure_starcoder2, .layer_norm = true},
      {.architecture = "gpt2", .configure = configure_gpt2, .layer_norm = true},
      {.architecture = "starcoder", .configure = configure_gpt2, .layer_norm = true},
      {.architecture = "falcon",
       .configure = configure_falcon,
       .layer_norm = true,
       .settings = {"use_parallel_residual"}},
      {.architecture = "gpt-oss",
       .configure = configure_gpt_oss,
       .names = joined(
           {expert_names(), {{"post_attention_norm", "post_attention_layernorm"}, {"attn_sinks", "self_attn.sinks"}}}),
       .settings = {"expert_count"},
       .windows = true},
      deepseek2("deepseek2"),
      deepseek2("mistral4"),
  };
}

}  // namespace attnpack
