#include <algorithm>
#include <string_view>

#include <attnpack/models/detail/hf_configure.h>
#include <attnpack/models/detail/hf_families.h>

// Families in which most layers are recurrent: delta rules, Mamba-2 and short convolutions, with attention every few
// layers.
namespace attnpack {

namespace {

using Options = CausalLMOptions;

// Which layers are recurrent by layer_types, or else by `usual`.
std::vector<bool> recurrent_layers(const HfSettings& config, int64_t layers, std::string_view word,
                                   const std::function<bool(int64_t layer)>& usual) {
  if (const auto listed = layers_of_kind(config, layers, {word}, {"full_attention"})) return *listed;
  std::vector<bool> found(layers);
  for (int64_t layer = 0; layer < layers; ++layer) found[layer] = usual(layer);
  return found;
}

// Sizes of a GatedDeltaNet by the names that its families share.
RecurrentSettings delta_settings(const HfSettings& config, int64_t key_heads, int64_t value_heads, int64_t key_dim,
                                 int64_t value_dim) {
  return RecurrentSettings()
      .kind("gated_delta_net")
      .num_k_heads(config.size("linear_num_key_heads", key_heads))
      .num_v_heads(config.size("linear_num_value_heads", value_heads))
      .head_k_dim(config.size("linear_key_head_dim", key_dim))
      .head_v_dim(config.size("linear_value_head_dim", value_dim))
      .conv_kernel_size(config.size("linear_conv_kernel_dim", 4));
}

RecurrentSettings mamba_settings(const HfSettings& config, const Options& o) {
  const auto heads = config.size("mamba_n_heads", 128), width = o.embed_dim() * config.size("mamba_expand", 2);
  config.check(width % heads == 0, "mamba_n_heads in config.json is ", heads, ", which does not divide ", width,
               ", mamba_expand times hidden_size");
  const bool automatic = config.is_word("mamba_d_head", "auto");
  const auto dim = automatic ? width / heads : config.size("mamba_d_head", width / heads);
  config.check(dim * heads == width, "mamba_d_head in config.json is ", dim, ", wants ", width / heads,
               ", mamba_expand times hidden_size by mamba_n_heads");
  const auto* limits = config.get("time_step_limit").as<Json::List>();
  for (size_t i = 0; limits && i < limits->size(); ++i) {
    const auto* real = (*limits)[i].as<double>();
    const auto* whole = (*limits)[i].as<int64_t>();
    const double limit = real ? *real : whole ? static_cast<double>(*whole) : 0;
    config.check(limit == 0, "time_step_limit in config.json is ", quoted(config.get("time_step_limit")),
                 ", wants 0 and infinity: steps are not limited here");
  }
  return RecurrentSettings()
      .kind("mamba2")
      .num_v_heads(heads)
      .num_k_heads(config.size("mamba_n_groups", 1))
      .head_k_dim(config.size("mamba_d_state", 256))
      .head_v_dim(dim)
      .conv_kernel_size(config.size("mamba_d_conv", 4))
      .conv_bias(config.is_on("mamba_conv_bias", true))
      .bias(config.is_on("mamba_proj_bias"));
}

}  // namespace

void set_recurrent_layers(Options& o, const RecurrentSettings& settings, const std::vector<bool>& recurrent) {
  const auto count = std::count(recurrent.begin(), recurrent.end(), true);
  if (count == 0) return;
  o.recurrent(settings);
  if (count == o.num_layers()) return;
  auto& layers = layers_of(o);
  for (int64_t layer = 0; layer < o.num_layers(); ++layer) layers[layer].recurrent(recurrent[layer]);
}

void configure_qwen_hybrid(const HfSettings& config, Options& o) {
  check_silu(config);
  config.refuse_if_set("attention_bias");  // the gate has no bias here
  for (const char* name : {"attn_output_gate", "mamba_ssm_dtype", "mtp_num_hidden_layers"}) config.get(name);
  o.head_dim(config.size("head_dim", 256)).norm("rms_plus_one").qk_norm(QkNorm(true).plus_one(true).eps(o.eps()));
  o.scores(ScoreSettings().gate("element"));
  set_rotated_part(config, o, 0.25);
  const auto every = config.size("full_attention_interval", 4);
  set_recurrent_layers(o, delta_settings(config, 16, 32, 128, 128),
                       recurrent_layers(config, o.num_layers(), "linear_attention",
                                        [=](int64_t layer) { return (layer + 1) % every != 0; }));
}

void configure_qwen3_next(const HfSettings& config, Options& o) {
  configure_qwen_hybrid(config, o);
  const auto is_dense = dense_by_step(config);
  const auto width = config.size("moe_intermediate_size", 512),
             shared = config.size("shared_expert_intermediate_size", 512);
  const bool normalize = config.is_on("norm_topk_prob", true);
  if (config.whole_number("num_experts", 512) == 0) return;
  o.experts(experts(config, width, "num_experts", 512, 10).normalize(normalize).shared_dim(shared).shared_gate(true));
  set_dense_layers(o, is_dense);
}

void configure_qwen3_5_moe(const HfSettings& config, Options& o) {
  configure_qwen_hybrid(config, o);
  const auto width = config.size("moe_intermediate_size", 512),
             shared = config.size("shared_expert_intermediate_size", 512);
  o.experts(experts(config, width, "num_experts", 256, 8).normalize(true).shared_dim(shared).shared_gate(true));
}

void configure_olmo_hybrid(const HfSettings& config, Options& o) {
  check_silu(config);
  for (const char* name :
       {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"})
    config.get(name);  // of new weights
  o.qk_norm(QkNorm(true).all_heads(true).eps(o.eps()));
  const auto* rope = &config.get("rope_parameters");
  const auto* base = rope->find("rope_theta");
  if ((!base || base->is_null()) && config.get("rope_theta").is_null()) o.position_embedding("none");
  const auto heads = o.num_heads();
  const auto key_heads = config.size("linear_num_key_heads", heads);
  const auto key_dim = config.size("linear_key_head_dim", std::max<int64_t>(3 * o.embed_dim() / (4 * key_heads), 1));
  const auto last = o.num_layers() - 1;
  const auto recurrent = recurrent_layers(config, o.num_layers(), "linear_attention",
                                          [=](int64_t layer) { return last < 3 ? layer != last : layer % 4 != 3; });
  set_recurrent_layers(o,
                       delta_settings(config, heads, heads, key_dim, 2 * key_dim)
                           .norm_eps(1e-5)
                           .allow_neg_eigval(config.is_on("linear_allow_neg_eigval", true)),
                       recurrent);
  // Layers of attention have their norms behind, recurrent ones before.
  auto& layers = layers_of(o);
  for (int64_t layer = 0; layer < o.num_layers(); ++layer)
    if (!recurrent[layer]) layers[layer].layout("output");
}

namespace {

// The layers that the list of 1-based numbers names.
std::vector<bool> numbered_layers(const HfSettings& config, const Json& numbers, int64_t layers) {
  std::vector<bool> found(layers);
  const auto* list = numbers.as<Json::List>();
  for (size_t i = 0; list && i < list->size(); ++i) {
    const auto* number = (*list)[i].as<int64_t>();
    config.check(number && *number >= 1 && *number <= layers, "linear_attn_config in config.json names layer ",
                 quoted((*list)[i]), ", wants 1 to ", layers);
    found[*number - 1] = true;
  }
  return found;
}

}  // namespace

void configure_kimi_linear(const HfSettings& config, Options& o) {
  check_silu(config);
  for (const char* name : {"mla_use_nope", "moe_layer_freq", "use_grouped_topk"})
    config.get(name);  // they follow from the others
  config.check_word("moe_router_activation_func", "sigmoid");
  set_latent(
      config, o,
      MultiHeadLatentAttentionOptions(1, 1).kv_lora_rank(512).qk_nope_head_dim(128).qk_rope_head_dim(64).v_head_dim(
          128));
  o.position_embedding("none");

  // Released checkpoints have the sizes of recurrent layers in an object of their own.
  static const Json kNothing;
  const auto& linear_config = config.get("linear_attn_config");
  const auto size = [&](const char* name, const char* flat, int64_t usual) {
    const auto* number = linear_config.find(name) ? linear_config.find(name)->as<int64_t>() : nullptr;
    const auto given = config.size(flat, usual);
    config.check(!number || *number >= 1, name, " of linear_attn_config in config.json is ", number ? *number : 0,
                 ", wants an int of at least 1");
    return number ? *number : given;
  };
  const auto dim = size("head_dim", "linear_head_dim", 128), heads = size("num_heads", "linear_num_heads", 32);
  const auto* listed = linear_config.find("kda_layers");
  const auto by_number = numbered_layers(config, listed ? *listed : kNothing, o.num_layers());
  set_recurrent_layers(o,
                       RecurrentSettings()
                           .kind("kimi_delta_attention")
                           .num_v_heads(heads)
                           .head_k_dim(dim)
                           .conv_kernel_size(size("short_conv_kernel_size", "linear_conv_kernel_dim", 4)),
                       recurrent_layers(config, o.num_layers(), "linear_attention", [&](int64_t layer) {
                         return listed ? by_number[layer] : layer == 0 || layer % 4 != 0;
                       }));

  const auto width = config.size("moe_intermediate_size", 1024);
  o.experts(experts(config, width, "num_local_experts", 256, 8)
                .scores("sigmoid")
                .correction(true)
                .normalize(config.is_on("norm_topk_prob", true))
                .scaling(config.number("routed_scaling_factor", 2.446))
                .num_groups(config.size("n_group", 1))
                .top_groups(config.size("topk_group", 1))
                .shared_dim(width * config.size("n_shared_experts", 1)));
  const auto dense = config.whole_number("first_k_dense_replace", 1);
  const auto listed_dense = layers_of_kind(config, o.num_layers(), {"dense"}, {"sparse"}, "mlp_layer_types");
  set_dense_layers(o, [&](int64_t layer) { return listed_dense ? (*listed_dense)[layer] : layer < dense; });
}

namespace {

void set_short_layers(const HfSettings& config, Options& o) {
  o.bias(false).out_bias(false).qk_norm(QkNorm(true).eps(o.eps()));
  if (config.has("tie_embedding")) o.tie_embeddings(config.is_on("tie_embedding", true));
  if (!config.is_set("rope_parameters") && !config.is_set("rope_theta")) o.rope_base(1e6);
  const auto attends = config.list_of_ints("full_attn_idxs");
  const bool all = config.get("full_attn_idxs").is_null();
  set_recurrent_layers(o,
                       RecurrentSettings()
                           .kind("gated_convolution")
                           .conv_kernel_size(config.size("conv_L_cache", 3))
                           .bias(config.is_on("conv_bias")),
                       recurrent_layers(config, o.num_layers(), "conv", [&](int64_t layer) {
                         return !all && std::find(attends.begin(), attends.end(), layer) == attends.end();
                       }));
}

}  // namespace

void configure_lfm2(const HfSettings& config, Options& o) {
  for (const char* name :
       {"conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim", "block_mlp_init_scale", "block_norm_eps",
        "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "num_heads", "theta", "use_pos_enc"})
    config.get(name);  // transformers reads none of them
  // The width inside the feed-forward, as Llama's first code computes it.
  auto width = config.size("block_ff_dim", *o.hidden_dim());
  const double multiplier = config.number("block_ffn_dim_multiplier", 1.0);
  const auto multiple = config.size("block_multiple_of", 256);
  if (config.is_on("block_auto_adjust_ff_dim", true)) {
    width = static_cast<int64_t>(multiplier * static_cast<double>(2 * width / 3));
    width = multiple * ((width + multiple - 1) / multiple);
  }
  o.hidden_dim(width);
  set_short_layers(config, o);
}

void configure_lfm2_moe(const HfSettings& config, Options& o) {
  set_short_layers(config, o);
  const auto width = config.size("moe_intermediate_size", 1792);
  o.experts(experts(config, width, "num_experts", 32, 4)
                .scores("sigmoid")
                .correction(config.is_on("use_expert_bias", true))
                .normalize(config.is_on("norm_topk_prob", true))
                .scaling(config.number("routed_scaling_factor", 1)));
  set_first_dense(config, o, "num_dense_layers", 2);
}

namespace {

// Which layers are Mamba's, by the words of transformers or by those of older checkpoints.
std::vector<bool> mamba_layers(const HfSettings& config, int64_t layers) {
  config.get("layers_block_type");  // some configurations have both
  const char* const name = config.has("layer_types") ? "layer_types" : "layers_block_type";
  return layers_of_kind(config, layers, {"mamba", "linear_attention"}, {"attention", "full_attention"}, name)
      .value_or(std::vector<bool>(layers, true));
}

}  // namespace

// Bamba, whose layers of Mamba are those that attn_layer_indices does not name.
void configure_bamba(const HfSettings& config, Options& o) {
  check_silu(config);
  for (const char* name : {"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"}) config.get(name);
  o.mlp_bias(config.is_on("mlp_bias"));
  set_rotated_part(config, o, 0.5);
  const auto attends = config.list_of_ints("attn_layer_indices");
  std::vector<bool> mamba(o.num_layers(), true);
  for (const auto layer : attends) {
    config.check(layer >= 0 && layer < o.num_layers(), "attn_layer_indices in config.json names layer ", layer,
                 ", wants 0 to ", o.num_layers() - 1);
    mamba[layer] = false;
  }
  set_recurrent_layers(o, mamba_settings(config, o), mamba);
}

void set_mamba_layers(const HfSettings& config, Options& o) {
  const auto settings = mamba_settings(config, o);
  set_recurrent_layers(o, settings, mamba_layers(config, o.num_layers()));
}

}  // namespace attnpack
