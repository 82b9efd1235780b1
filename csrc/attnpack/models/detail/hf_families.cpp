#include <algorithm>
#include <cmath>

#include <attnpack/models/detail/hf_config.h>
#include <attnpack/models/detail/hf_configure.h>
#include <attnpack/models/detail/hf_families.h>

namespace attnpack {

namespace {

using Options = CausalLMOptions;

void configure_llama(const HfSettings& config, Options& o) {
  o.mlp_bias(config.is_on("mlp_bias"));
  check_silu(config);
}

void configure_mistral(const HfSettings& config, Options& o) {
  o.bias(false).out_bias(false);
  check_silu(config);
  // transformers loads one that has layer_types as a Ministral.
  set_windows(config, o, window_size(config, 4096), [](int64_t) { return true; });
}

// The window of Qwen's models, which have a switch for it.
std::optional<int64_t> used_window(const HfSettings& config) {
  config.get("sliding_window");
  return config.is_on("use_sliding_window") ? window_size(config, 4096) : std::nullopt;
}

// Layers from max_window_layers on slide.
void set_qwen_windows(const HfSettings& config, Options& o) {
  const auto* given = config.get("max_window_layers").as<int64_t>();
  const int64_t first = given ? *given : 28;
  const auto size = used_window(config);
  check_silu(config);
  set_windows(config, o, size, [=](int64_t layer) { return layer >= first; });
}

void configure_qwen2(const HfSettings& config, Options& o) {
  o.bias(true).out_bias(false);
  set_qwen_windows(config, o);
}

void configure_qwen3(const HfSettings& config, Options& o) {
  o.head_dim(config.size("head_dim", 128)).qk_norm(QkNorm(true).eps(o.eps()));
  set_qwen_windows(config, o);
}

void configure_gemma(const HfSettings& config, Options& o) {
  const auto width = static_cast<double>(o.embed_dim());
  const auto query = config.number("query_pre_attn_scalar", 256);
  o.head_dim(config.size("head_dim", 256))
      .norm("rms_plus_one")
      .layout("sandwich")
      .activation(gated_activation(config, "gelu_pytorch_tanh"))
      .embed_scale(std::sqrt(width))
      .scores(ScoreSettings().scale(1 / std::sqrt(query)));
}

void configure_gemma2(const HfSettings& config, Options& o) {
  configure_gemma(config, o);
  o.scores()->softcap(config.softcap("attn_logit_softcapping", 50));
  o.final_softcap(config.softcap("final_logit_softcapping", 30));
  set_windows(config, o, window_size(config, 4096), [](int64_t layer) { return layer % 2 == 0; });
}

void configure_gemma3(const HfSettings& config, Options& o) {
  configure_gemma(config, o);
  o.final_softcap(config.softcap("final_logit_softcapping", 0));
  o.qk_norm(QkNorm(true).plus_one(true).eps(o.eps()));
  const char* name = config.has("_sliding_window_pattern") ? "_sliding_window_pattern" : "sliding_window_pattern";
  const auto pattern = config.size(name, 6);
  set_windows(config, o, window_size(config, 4096), [=](int64_t layer) { return (layer + 1) % pattern != 0; });
  set_ropes_by_kind(o, hf_rope_by_kind(config, 1e6, 1e4));
}

void configure_phi3(const HfSettings& config, Options& o) {
  check_silu(config);
  set_rotated_part(config, o, 1);
  set_window(config, o, window_size(config, std::nullopt));
}

void configure_olmo2(const HfSettings& config, Options& o) {
  check_silu(config);
  o.layout("output").qk_norm(QkNorm(true).all_heads(true).eps(o.eps()));
}

void configure_starcoder2(const HfSettings& config, Options& o) {
  const bool bias = config.is_on("use_bias", true);
  config.check_word("mlp_type", "default");
  config.check_word("norm_type", "layer_norm");
  for (const char* name : {"layer_norm_epsilon", "scale_attn_weights"}) config.get(name);  // transformers reads neither
  o.norm("layer").bias(bias).out_bias(bias).mlp_bias(bias).activation(plain_activation(config, "gelu_pytorch_tanh"));
  set_window(config, o, window_size(config, std::nullopt));
}

void configure_gpt2(const HfSettings& config, Options& o) {
  config.refuse_if_set("scale_attn_by_inverse_layer_idx");
  config.refuse_if_set("add_cross_attention");
  o.norm("layer").bias(true).out_bias(true).mlp_bias(true).position_embedding("learned");
  o.activation(plain_activation(config, config.model_type() == "gpt2" ? "gelu_new" : "gelu_pytorch_tanh"));
  if (!config.is_on("scale_attn_weights", true)) o.scores(ScoreSettings().scale(1.0));
}

void configure_gpt_bigcode(const HfSettings& config, Options& o) {
  configure_gpt2(config, o);
  o.num_kv_heads(config.is_on("multi_query", true) ? 1 : o.num_heads());
}

void configure_falcon(const HfSettings& config, Options& o) {
  config.refuse_if_set("alibi");  // it is added before the scale
  const bool newer = config.is_on("new_decoder_architecture"), parallel = config.is_on("parallel_attn", true);
  const bool one_kv_head = config.is_on("multi_query", true);
  const auto norms = config.size("num_ln_in_parallel_attn", newer ? 2 : 1);
  config.check(parallel ? norms == 1 || (newer && norms == 2) : !newer,
               "new_decoder_architecture, parallel_attn and num_ln_in_parallel_attn in config.json do not go together");
  const auto kv_heads = config.size("num_kv_heads", o.num_heads());
  const bool bias = config.is_on("bias");
  o.num_kv_heads(newer         ? kv_heads
                 : one_kv_head ? 1
                               : o.num_heads())
      .norm("layer")
      .bias(bias)
      .out_bias(bias)
      .mlp_bias(bias)
      .activation(plain_activation(config, "gelu"));
  if (parallel) o.layout(norms == 2 ? "parallel_two" : "parallel");
}

void configure_gpt_oss(const HfSettings& config, Options& o) {
  const bool bias = config.is_on("attention_bias", true);
  for (const auto& [name, value] : {std::pair{"swiglu_alpha", 1.702}, std::pair{"swiglu_limit", 7.0}})
    config.check(config.number(name, value) == value, name, " in config.json is not ", value,
                 ", which is not supported", kOtherModel);
  o.bias(bias).out_bias(bias).head_dim(config.size("head_dim", 64)).scores(ScoreSettings().sinks(true));
  o.experts(experts(config, *o.hidden_dim(), "num_local_experts", 128, 4)
                .normalize(true)
                .gate_bias(true)
                .bias(true)
                .activation("clamped_swiglu"));
  check_silu(config);
  set_windows(config, o, window_size(config, 128), [](int64_t layer) { return layer % 2 == 0; });
}

void configure_qwen3_moe(const HfSettings& config, Options& o) {
  o.qk_norm(QkNorm(true).eps(o.eps()));
  o.experts(experts(config, config.size("moe_intermediate_size", 768), count_of_experts(config), 128, 8)
                .normalize(config.is_on("norm_topk_prob")));
  set_dense_layers(o, dense_by_step(config));
  check_silu(config);
  set_window(config, o, used_window(config));
}

// Latent attention, and experts beside a shared one.
void configure_deepseek(const HfSettings& config, Options& o) {
  const bool third = config.model_type() == "deepseek_v3";
  set_latent(config, o,
             MultiHeadLatentAttentionOptions(1, 1)
                 .kv_lora_rank(512)
                 .q_lora_rank(1536)
                 .qk_nope_head_dim(128)
                 .qk_rope_head_dim(64)
                 .v_head_dim(128));
  o.rope_interleaved(!third || config.is_on("rope_interleave", true));
  config.refuse_if_set("mlp_bias");
  check_silu(config);

  config.check_word("scoring_func", third ? "sigmoid" : "softmax");
  const auto width = config.size("moe_intermediate_size", third ? 2048 : 1407);
  auto mixture = experts(config, width, "n_routed_experts", third ? 256 : 64, third ? 8 : 6)
                     .scaling(config.number("routed_scaling_factor", third ? 2.5 : 1.0))
                     .shared_dim(width * config.size("n_shared_experts", third ? 1 : 2));
  bool grouped = true;
  if (third) {
    config.check_word("topk_method", "noaux_tc");
    mixture.scores("sigmoid").correction(true).normalize(config.is_on("norm_topk_prob", true));
  } else {
    config.refuse_if_set("norm_topk_prob");  // transformers does not honour it
    grouped = config.is_word("topk_method", "group_limited_greedy");
    if (!grouped) config.check_word("topk_method", "greedy");
  }
  const auto groups = config.size("n_group", third ? 8 : 1), best = config.size("topk_group", third ? 4 : 1);
  if (grouped) mixture.num_groups(groups).top_groups(best);
  o.experts(mixture);
  config.check(config.size("moe_layer_freq", 1) == 1, "moe_layer_freq in config.json is not 1, which is not supported",
               kOtherModel);
  set_first_dense(config, o, "first_k_dense_replace", third ? 3 : 0);
}

const std::set<std::string_view> kSoftcaps{"attn_logit_softcapping", "final_logit_softcapping"};
const std::vector<const char*> kWindowLayers{"max_window_layers"};

const HfAliases kOfGpt2{{"hidden_size", "n_embd", true},         {"max_position_embeddings", "n_positions", true},
                        {"num_attention_heads", "n_head", true}, {"num_hidden_layers", "n_layer", true},
                        {"intermediate_size", "n_inner"},        {"hidden_act", "activation_function"},
                        {"rms_norm_eps", "layer_norm_epsilon"}};
const HfAliases kOfKimi{{"max_position_embeddings", "model_max_length", true},
                        {"norm_topk_prob", "moe_renormalize", true},
                        {"n_group", "num_expert_group", true},
                        {"num_local_experts", "num_experts", true},
                        {"num_experts_per_tok", "num_experts_per_token", true},
                        {"n_shared_experts", "num_shared_experts", true}};
const HfAliases kOfLfm2{{"rms_norm_eps", "norm_eps"}};
const HfAliases kOfMixture{{"intermediate_size", "moe_intermediate_size"}};  // no layer has another feed-forward
const HfAliases kOfGemma{{"hidden_act", "hidden_activation"}};
const std::vector<HfSize> kSizesOfGemma3{{"vocab_size", 262208},      {"hidden_size", 2304},
                                         {"intermediate_size", 9216}, {"num_hidden_layers", 26},
                                         {"head_dim", 256},           {"num_attention_heads", 8},
                                         {"num_key_value_heads", 4},  {"max_position_embeddings", 131072}};
const HfAliases kOfStarcoder2{{"rms_norm_eps", "norm_epsilon"}};
const HfAliases kOfLayerNorm{{"rms_norm_eps", "layer_norm_eps"}};
const HfAliases kOfGptNeox{
    {"rms_norm_eps", "layer_norm_eps"}, {"partial_rotary_factor", "rotary_pct"}, {"rope_theta", "rotary_emb_base"}};
const HfAliases kOfFalcon{
    {"rms_norm_eps", "layer_norm_epsilon"}, {"intermediate_size", "ffn_hidden_size"}, {"hidden_act", "activation"}};

}  // namespace

const std::vector<HfFamily>& hf_families() {
  static const std::vector<HfFamily> families = {
      // model_type, configure, names of the tensors, names of the settings, eps, tied embeddings, what it honours
      {"llama", configure_llama},
      {"mistral", configure_mistral},
      {"qwen2", configure_qwen2},
      {"qwen3", configure_qwen3},
      {"gemma2", configure_gemma2, llama_parts, kOfGemma, 1e-6, true, kSoftcaps},
      {.model_type = "gemma3_text",
       .configure = configure_gemma3,
       .aliases = kOfGemma,
       .tied = true,
       .honours = {"final_logit_softcapping"},
       .rope_by_kind = true,
       .sizes = kSizesOfGemma3},
      {"phi3", configure_phi3, phi3_parts, {}, 1e-5, false, {"partial_rotary_factor"}},
      {"olmo2", configure_olmo2, llama_parts, {}, 1e-5},
      {"starcoder2", configure_starcoder2, starcoder2_parts, kOfStarcoder2, 1e-5, true},
      {"gpt2", configure_gpt2, gpt2_parts, kOfGpt2, 1e-5, true},
      {"gpt_bigcode", configure_gpt_bigcode, gpt_bigcode_parts, kOfGpt2, 1e-5, true},
      {"falcon", configure_falcon, falcon_parts, kOfFalcon, 1e-5, true},
      {.model_type = "gpt_oss",
       .configure = configure_gpt_oss,
       .parts = gpt_oss_parts,
       .eps = 1e-5,
       .needs_rope = true},
      {.model_type = "qwen3_moe", .configure = configure_qwen3_moe, .ignores = kWindowLayers},
      {"deepseek_v2", configure_deepseek},
      {"deepseek_v3", configure_deepseek},
      {.model_type = "smollm3",
       .configure = configure_smollm3,
       .tied = true,
       .rope_base = 2e6,
       .ignores = kWindowLayers},
      {.model_type = "granite", .configure = configure_granite},
      {.model_type = "granitemoehybrid", .configure = configure_granite_hybrid, .parts = granite_hybrid_parts},
      {.model_type = "cohere2", .configure = configure_cohere2, .aliases = kOfLayerNorm, .eps = 1e-5, .tied = true},
      {.model_type = "glm4",
       .configure = configure_glm4,
       .parts = glm4_parts,
       .eps = 1.5625e-7,
       .honours = {"partial_rotary_factor"}},
      {.model_type = "exaone4", .configure = configure_exaone4, .eps = 1e-5},
      {.model_type = "olmo3",
       .configure = configure_olmo3,
       .eps = 1e-5,
       .rope_by_kind = true,
       .ignores = kWindowLayers},
      {.model_type = "ministral", .configure = configure_ministral, .ignores = kWindowLayers},
      {.model_type = "ministral3", .configure = configure_ministral3, .eps = 1e-5, .needs_rope = true},
      {.model_type = "seed_oss", .configure = configure_seed_oss},
      {.model_type = "hunyuan_v1_dense", .configure = configure_hunyuan, .parts = hunyuan_parts, .eps = 1e-5},
      {.model_type = "ernie4_5", .configure = configure_ernie, .eps = 1e-5, .tied = true, .rope_base = 5e5},
      {.model_type = "helium", .configure = configure_helium, .eps = 1e-8, .rope_base = 1e5},
      {.model_type = "arcee", .configure = configure_arcee, .eps = 1e-5},
      {.model_type = "gemma4_text",
       .configure = configure_gemma4,
       .parts = gemma4_parts,
       .aliases = kOfGemma,
       .tied = true,
       .honours = {"final_logit_softcapping", "partial_rotary_factor", "use_bidirectional_attention"},
       .rope_by_kind = true},
      {.model_type = "phi",
       .configure = configure_phi,
       .parts = phi_parts,
       .aliases = kOfLayerNorm,
       .eps = 1e-5,
       .honours = {"partial_rotary_factor"}},
      {.model_type = "gpt_neox",
       .configure = configure_gpt_neox,
       .parts = gpt_neox_parts,
       .aliases = kOfGptNeox,
       .eps = 1e-5,
       .honours = {"partial_rotary_factor"},
       .base = "gpt_neox."},
      {.model_type = "stablelm",
       .configure = configure_stablelm,
       .aliases = kOfLayerNorm,
       .eps = 1e-5,
       .honours = {"partial_rotary_factor"}},
      {.model_type = "mixtral", .configure = configure_mixtral, .parts = mixtral_parts, .eps = 1e-5, .rope_base = 1e6},
      {.model_type = "minimax_m2",
       .configure = configure_minimax_m2,
       .parts = mixtral_parts,
       .honours = {"partial_rotary_factor"},
       .rope_base = 5e6},
      {.model_type = "llama4_text",
       .configure = configure_llama4,
       .parts = llama4_parts,
       .eps = 1e-5,
       .rope_base = 5e5},
      {.model_type = "mistral4",
       .configure = configure_mistral4,
       .parts = packed_experts_parts,
       .honours = {"partial_rotary_factor"},
       .needs_rope = true},
      {.model_type = "qwen3_5_text",
       .configure = configure_qwen_hybrid,
       .parts = qwen_hybrid_parts,
       .honours = {"partial_rotary_factor"}},
      {.model_type = "qwen3_5_moe_text",
       .configure = configure_qwen3_5_moe,
       .parts = qwen3_5_moe_parts,
       .aliases = kOfMixture,
       .honours = {"partial_rotary_factor"}},
      {.model_type = "qwen3_next",
       .configure = configure_qwen3_next,
       .parts = qwen3_next_parts,
       .honours = {"partial_rotary_factor"},
       .ignores = kWindowLayers},
      {.model_type = "olmo_hybrid", .configure = configure_olmo_hybrid, .parts = olmo_hybrid_parts},
      {.model_type = "kimi_linear",
       .configure = configure_kimi_linear,
       .parts = kimi_linear_parts,
       .aliases = kOfKimi,
       .eps = 1e-5},
      {.model_type = "bamba",
       .configure = configure_bamba,
       .parts = bamba_parts,
       .eps = 1e-5,
       .honours = {"partial_rotary_factor"}},
      {"lfm2", configure_lfm2, lfm2_parts, kOfLfm2, 1e-5, true},
      {"lfm2_moe", configure_lfm2_moe, lfm2_moe_parts, kOfLfm2, 1e-5, true},
  };
  return families;
}

}  // namespace attnpack
