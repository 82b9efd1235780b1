#include <algorithm>

#include <attnpack/models/detail/hf_config.h>
#include <attnpack/models/detail/hf_configure.h>
#include <attnpack/models/detail/hf_families.h>

namespace attnpack {

namespace {
using Options = CausalLMOptions;
}

// Each layer has a shared expert, which is the feed-forward where there are no others.
void configure_granite_hybrid(const HfSettings& config, Options& o) {
  for (const char* name : {"mamba_chunk_size", "num_experts_per_tok"}) config.get(name);
  set_mamba_layers(config, o);
  if (o.recurrent()) check_silu(config);  // it is the activation of these layers too
  set_multipliers(config, o);
  if (!config.is_word("position_embedding_type", "rope")) o.position_embedding("none");
  const auto activation = gated_activation(config, "silu");
  const auto shared = config.size("shared_intermediate_size", 1024), width = *o.hidden_dim();
  o.activation(activation).hidden_dim(shared);
  if (config.whole_number("num_local_experts", 8) > 0)
    o.experts(
        experts(config, width, "num_local_experts", 8, 2).normalize(true).activation(activation).shared_dim(shared));
}

void configure_mixtral(const HfSettings& config, Options& o) {
  o.bias(false).out_bias(false);
  o.experts(experts(config, *o.hidden_dim(), count_of_experts(config), 8, 2)
                .normalize(true)
                .activation(gated_activation(config, "silu")));
  set_window(config, o, window_size(config, std::nullopt));
}

void configure_minimax_m2(const HfSettings& config, Options& o) {
  // of the released model; transformers reads none of them
  config.check_word("scoring_func", "sigmoid");
  config.check_word("qk_norm_type", "per_layer");
  for (const char* name : {"use_qk_norm", "use_routing_bias", "attn_type_list", "use_mtp", "num_mtp_modules",
                           "mtp_transformer_layers", "shared_intermediate_size"})
    config.get(name);
  o.bias(false).out_bias(false).head_dim(config.size("head_dim", 128));
  o.qk_norm(QkNorm(true).all_heads(true).eps(o.eps()));
  o.experts(experts(config, *o.hidden_dim(), count_of_experts(config), 256, 8)
                .scores("sigmoid")
                .correction(true)
                .normalize(true)
                .activation(gated_activation(config, "silu")));
  const auto& dims = config.get("rotary_dim");
  const auto usual = dims.is_null() ? 1.0 : config.number("rotary_dim", 1) / static_cast<double>(*o.head_dim());
  set_rotated_part(config, o, usual);
}

// Layers that rotate have chunks, and norms without weights behind the rotation; the scores of the others grow with the
// position.
void configure_llama4(const HfSettings& config, Options& o) {
  const auto rotates = rotated_layers(config, o.num_layers());
  const auto* size = config.get("attention_chunk_size").as<int64_t>();
  const bool absent = !config.has("attention_chunk_size");
  config.check(absent || (size ? *size >= 1 : config.get("attention_chunk_size").is_null()),
               "attention_chunk_size in config.json is ", quoted(config.get("attention_chunk_size")),
               ", wants an int of at least 1, or null");
  const auto chunk = absent ? std::make_optional<int64_t>(8192) : size ? std::make_optional(*size) : std::nullopt;
  const auto listed = layers_of_kind(config, o.num_layers(), {"chunked_attention"}, {"full_attention"});
  const auto floor_scale = config.number("floor_scale", 8192), attn_scale = config.number("attn_scale", 0.1);
  const bool norms = config.is_on("use_qk_norm", true), grows = config.is_on("attn_temperature_tuning", true);
  o.head_dim(config.size("head_dim", 128)).rope_interleaved(true).activation(gated_activation(config, "silu"));
  if (norms) o.qk_norm(QkNorm(true).eps(o.eps()).after_rope(true).weights(false));
  if (grows)
    o.scores(ScoreSettings().query_scale(QueryScale().type("llama4").floor_scale(floor_scale).attn_scale(attn_scale)));
  set_rotated_layers(o, [&](int64_t layer) { return rotates[layer]; });
  o.layer_settings().resize(o.num_layers());
  for (int64_t i = 0; i < o.num_layers(); ++i) {
    auto& layer = o.layer_settings()[i];
    layer.qk_norm(rotates[i]).query_scale(!rotates[i]);
    const bool chunked = listed ? (*listed)[i] : rotates[i] && chunk;
    config.check(!chunked || chunk,
                 "layer_types in config.json has 'chunked_attention', but attention_chunk_size is null");
    if (chunked) layer.chunk(*chunk);
  }

  const auto shared = *o.hidden_dim();
  o.hidden_dim(config.size("intermediate_size_mlp", 16384));
  const auto every = config.size("interleave_moe_layer_step", 1);
  const auto with_experts = config.list_of_ints("moe_layers");
  const bool given = !config.get("moe_layers").is_null();
  std::vector<bool> dense(o.num_layers());
  for (int64_t i = 0; i < o.num_layers(); ++i)
    dense[i] =
        given ? std::find(with_experts.begin(), with_experts.end(), i) == with_experts.end() : (i + 1) % every != 0;
  const auto mixture = experts(config, shared, count_of_experts(config), 16, 1)
                           .scores("sigmoid")
                           .weigh_inputs(true)
                           .activation(o.activation())
                           .shared_dim(shared);
  if (std::find(dense.begin(), dense.end(), false) == dense.end()) return;
  o.experts(mixture);
  set_dense_layers(o, [&](int64_t layer) { return dense[layer]; });
}

// DeepSeek's latent attention and experts, with scores that grow with the position.
void configure_mistral4(const HfSettings& config, Options& o) {
  const auto rotated = config.size("qk_rope_head_dim", 64), fixed = config.size("qk_nope_head_dim", 64);
  const auto part = hf_rotated_part(config, static_cast<double>(rotated) / static_cast<double>(rotated + fixed));
  config.check(static_cast<int64_t>(part * static_cast<double>(rotated + fixed)) == rotated,
               "partial_rotary_factor = ", part, " in config.json does not give qk_rope_head_dim ", rotated);
  set_latent(config, o,
             MultiHeadLatentAttentionOptions(1, 1)
                 .kv_lora_rank(256)
                 .q_lora_rank(1024)
                 .qk_nope_head_dim(fixed)
                 .qk_rope_head_dim(rotated)
                 .v_head_dim(128)
                 .query_scale(log_query_scale(config)));
  o.rope_interleaved(config.is_on("rope_interleave", true));
  const auto activation = gated_activation(config, "silu");
  const auto width = config.size("moe_intermediate_size", 2048);
  config.check(config.size("n_group", 1) == 1 && config.size("topk_group", 1) == 1,
               "n_group and topk_group in config.json are not 1, which is not supported yet", kOtherModel);
  o.activation(activation)
      .experts(experts(config, width, "n_routed_experts", 128, 4)
                   .normalize(config.is_on("norm_topk_prob", true))
                   .scaling(config.number("routed_scaling_factor", 1))
                   .activation(activation)
                   .shared_dim(width * config.size("n_shared_experts", 1)));
  set_first_dense(config, o, "first_k_dense_replace", 0);
}

}  // namespace attnpack
