#include <attnpack/models/detail/gguf_configure.h>
#include <attnpack/models/detail/hf_families.h>

namespace attnpack {

namespace {
using Options = CausalLMOptions;

const GgufNames kOutputNorms{{"post_attention_norm", "post_attention_layernorm"},
                             {"post_ffw_norm", "post_feedforward_layernorm"}};

// Only layers with a window rotate.
void rotate_in_windows(Options& o) {
  for (int64_t i = 0; i < o.num_layers(); ++i) o.layer_settings()[i].rope(slides(o, i));
}

void configure_smollm3(const GgufSettings&, Options& o) {
  auto& layers = layers_of(o);
  for (int64_t i = 0; i < o.num_layers(); ++i) layers[i].rope(i % 4 != 3);
}

void configure_cohere2(const GgufSettings& file, Options& o) {
  o.norm("layer_no_bias").layout("parallel").rope_interleaved(true).logit_scale(file.number("logit_scale", 1));
  if (set_windows_in_turns(file, o, 4)) rotate_in_windows(o);
}

void configure_glm4(const GgufSettings& file, Options& o) {
  set_rotated_part(file, o);
  o.layout("sandwich").rope_interleaved(true);
}

void configure_exaone4(const GgufSettings& file, Options& o) {
  o.layout("output");
  if (set_windows_in_turns(file, o, 4)) rotate_in_windows(o);
}

// OLMo 2 and 3. Layers with a window rotate by only the base.
void configure_olmo2(const GgufSettings& file, Options& o) {
  o.layout("output").qk_norm(QkNorm(true).all_heads(true).eps(o.eps()));
  if (!set_windows_in_turns(file, o, 4) || !o.rope_scaling()) return;
  for (int64_t i = 0; i < o.num_layers(); ++i)
    if (slides(o, i)) o.layer_settings()[i].rope_scaling(RopeScaling());
}

void configure_mistral3(const GgufSettings& file, Options& o) {
  if (o.rope_scaling() && file.is_set("rope.scaling.yarn_log_multiplier")) o.rope_scaling()->attention_factor(1.0);
  if (!file.is_set("attention.temperature_scale")) return;
  o.scores(ScoreSettings().query_scale(
      QueryScale()
          .type("log")
          .llama_4_scaling_beta(file.number("attention.temperature_scale"))
          .original_max_position_embeddings(file.size("rope.scaling.original_context_length"))));
}

void configure_hunyuan(const GgufSettings&, Options& o) { o.qk_norm(QkNorm(true).eps(o.eps()).after_rope(true)); }

void configure_ernie(const GgufSettings&, Options& o) { o.rope_interleaved(true); }

void configure_arcee(const GgufSettings&, Options& o) { o.activation("relu2"); }

void configure_phi2(const GgufSettings& file, Options& o) {
  set_rotated_part(file, o);
  o.layout("parallel").activation("gelu_tanh").head_bias(file.has_shape("lm_head.bias"));
}

void configure_gptneox(const GgufSettings& file, Options& o) {
  set_rotated_part(file, o);
  if (file.is_on("use_parallel_residual", true)) o.layout("parallel_two");
  o.activation("gelu");
}

void configure_stablelm(const GgufSettings& file, Options& o) {
  file.check(!file.has_shape("model.layers.0.self_attn.q_norm.weight"),
             "has a norm for the queries of each head (attn_q_norm), which is not supported yet", kOtherModel);
  set_rotated_part(file, o);
  if (file.is_on("use_parallel_residual", true)) o.layout("parallel");
}

}  // namespace

GgufFamilies gguf_newer_families() {
  return {
      {.architecture = "smollm3", .configure = configure_smollm3, .interleaved = true},
      {.architecture = "granite", .configure = configure_granite, .interleaved = true, .settings = granite_settings()},
      {.architecture = "cohere2",
       .configure = configure_cohere2,
       .layer_norm = true,
       .settings = {"logit_scale"},
       .windows = true},
      {.architecture = "glm4",
       .configure = configure_glm4,
       .names = sandwich_names(),
       .fused = {{"ffn_up", {"mlp.gate_proj", "mlp.up_proj"}}},
       .settings = {"rope.dimension_count"}},
      {.architecture = "exaone4", .configure = configure_exaone4, .names = kOutputNorms, .windows = true},
      {.architecture = "olmo2", .configure = configure_olmo2, .names = kOutputNorms, .windows = true},
      {.architecture = "mistral3",
       .configure = configure_mistral3,
       .interleaved = true,
       .settings = {"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}},
      {.architecture = "seed_oss", .names = {{"post_attention_norm", "post_attention_layernorm"}}},
      {.architecture = "hunyuan-dense", .configure = configure_hunyuan},
      {.architecture = "ernie4_5", .configure = configure_ernie},
      {.architecture = "arcee", .configure = configure_arcee, .interleaved = true},
      {.architecture = "phi2", .configure = configure_phi2, .layer_norm = true, .settings = {"rope.dimension_count"}},
      {.architecture = "gptneox",
       .configure = configure_gptneox,
       .layer_norm = true,
       .settings = {"rope.dimension_count", "use_parallel_residual"}},
      {.architecture = "stablelm",
       .configure = configure_stablelm,
       .layer_norm = true,
       .settings = {"rope.dimension_count", "use_parallel_residual"}},
  };
}

}  // namespace attnpack
