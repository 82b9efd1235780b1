#include <attnpack/models/detail/gguf_configure.h>
#include <attnpack/models/detail/hf_families.h>

namespace attnpack {

namespace {
using Options = CausalLMOptions;

void configure_minimax_m2(const GgufSettings& file, Options& o) {
  set_rotated_part(file, o);
  o.qk_norm(QkNorm(true).all_heads(true).eps(o.eps())).experts(sigmoid_experts(file, true).correction(true));
}

// llama.cpp has these numbers of Llama 4 in its code: the width of a chunk, how scores grow behind it, and the number
// of experts of the model whose queries and keys have no norm.
constexpr int64_t kChunk = 8192, kWithoutNorm = 128;

// Layers that rotate have chunks, and norms without weights behind the rotation; the scores of every fourth, which does
// not, grow with the position. Weights of experts are factors on their inputs.
void configure_llama4(const GgufSettings& file, Options& o) {
  const auto& window = file.get("attention.sliding_window");
  file.check(window.is_null() || number_in(window) == static_cast<double>(kChunk),
             file.full("attention.sliding_window"), " is ", quoted(window), ", wants ", kChunk,
             " or no such key: llama.cpp reads no model of this architecture with other chunks", kOtherModel);
  const auto chunked = sliding_layers(file, o.num_layers(), 4);
  const auto step = file.size("interleave_moe_layer_step");
  const auto width = file.size("expert_feed_forward_length");
  o.rope_interleaved(true)
      .scores(ScoreSettings().query_scale(
          QueryScale().type("llama4").floor_scale(static_cast<double>(kChunk)).attn_scale(0.1)))
      .experts(sigmoid_experts(file, false).weigh_inputs(true).shared_dim(width));
  const bool normed = o.experts()->num_experts() != kWithoutNorm;
  o.qk_norm(normed ? QkNorm(true).eps(o.eps()).after_rope(true).weights(false) : QkNorm(false));
  auto& layers = layers_of(o);
  for (int64_t i = 0; i < o.num_layers(); ++i) {
    const bool rotates = i % 4 != 3;
    layers[i].rope(rotates).qk_norm(rotates).query_scale(!rotates).experts((i + 1) % step == 0);
    if (chunked[i]) layers[i].chunk(kChunk);
  }
}

}  // namespace

std::set<std::string> granite_settings(bool experts) {
  std::set<std::string> settings{"embedding_scale", "residual_scale", "logit_scale", "attention.scale"};
  if (experts) settings.insert("expert_count");
  return settings;
}

void configure_granite(const GgufSettings& file, Options& o) {
  auto scores = ScoreSettings();
  if (file.is_set("attention.scale")) scores.scale(file.number("attention.scale"));
  const auto& rotates = file.get("rope.scaling.finetuned");  // which says that here
  o.embed_scale(file.number("embedding_scale", 1))
      .residual_scale(file.number("residual_scale", 1))
      .logit_scale(1 / file.number("logit_scale", 1))
      .scores(scores)
      .position_embedding(rotates.is_null() || is_set(rotates) ? "rope" : "none");
}

void configure_granite_experts(const GgufSettings& file, Options& o) {
  configure_granite(file, o);
  o.experts(wide_experts(file).shared_dim(file.size_if_set("expert_shared_feed_forward_length")));
}

GgufFamilies gguf_mixture_families() {
  return {
      {.architecture = "granitemoe",
       .configure = configure_granite_experts,
       .names = joined({expert_names(), shared_names()}),
       .interleaved = true,
       .settings = granite_settings(true)},
      {.architecture = "minimax-m2",
       .configure = configure_minimax_m2,
       .names = joined({expert_names(), correction_names()}),
       .settings = {"rope.dimension_count", "expert_count"}},
      {.architecture = "llama4",
       .configure = configure_llama4,
       .names = joined({expert_names(), shared_names()}),
       .settings = {"expert_count"},
       .windows = true},
  };
}

}  // namespace attnpack
