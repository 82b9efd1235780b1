#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include <attnpack/models/detail/gguf_configure.h>
#include <attnpack/models/detail/hf_families.h>

namespace attnpack {

// The facts are those of llama.cpp's converter: decays are stored as -exp(A_log), convolutions without the dim of 1.
namespace {
using Options = CausalLMOptions;

// Layers for which attention.head_count_kv lists no heads. A count for all layers says that all attend.
std::vector<bool> layers_without_keys(const GgufSettings& file, const Options& o) {
  const auto* key = "attention.head_count_kv";
  const auto counts = file.by_layer(key, o.num_layers(), o.num_heads(), 0);
  std::set<int64_t> kinds(counts.begin(), counts.end());
  kinds.erase(0);
  check_equal_heads(file, key, kinds.size() == 1);
  std::vector<bool> without(counts.size());
  std::transform(counts.begin(), counts.end(), without.begin(), [](int64_t count) { return count == 0; });
  return without;
}

// Layers that attention.recurrent_layers lists, or all but the last of each full_attention_interval.
std::vector<bool> all_but_each(const GgufSettings& file, const Options& o) {
  const auto* key = "attention.recurrent_layers";
  const auto listed = file.bools_by_layer(key, o.num_layers(), true);
  file.check(listed || !file.has(key), file.full(key), " is ", quoted(file.get(key)),
             ", wants True or False for each of ", o.num_layers(), " layers", kDamaged);
  if (listed) return *listed;
  const auto every = file.size("full_attention_interval", 4);
  std::vector<bool> recurrent(o.num_layers());
  for (int64_t i = 0; i < o.num_layers(); ++i) recurrent[i] = i % every != every - 1;
  return recurrent;
}

int64_t width_by_head(const GgufSettings& file) {
  const auto width = file.size("ssm.inner_size"), heads = file.size("ssm.time_step_rank");
  file.check(width % heads == 0, file.full("ssm.inner_size"), " is ", width,
             ", wants a multiple of ssm.time_step_rank, ", heads, kDamaged);
  return width / heads;
}

// Sizes by the names that Mamba 2 and GatedDeltaNet share.
RecurrentSettings ssm_settings(const GgufSettings& file, const char* kind) {
  return RecurrentSettings()
      .kind(kind)
      .num_v_heads(file.size("ssm.time_step_rank"))
      .num_k_heads(file.size("ssm.group_count"))
      .head_k_dim(file.size("ssm.state_size"))
      .head_v_dim(width_by_head(file))
      .conv_kernel_size(file.size("ssm.conv_kernel"));
}

void configure_lfm2(const GgufSettings& file, Options& o) {
  file.refuse({"attention.sliding_window"});
  set_recurrent_layers(o,
                       RecurrentSettings()
                           .kind("gated_convolution")
                           .conv_kernel_size(file.size("shortconv.l_cache"))
                           .bias(file.some_name_ends_with("self_attn.in_proj.bias")),
                       layers_without_keys(file, o));
  o.bias(false).out_bias(false);
}

void configure_lfm2_experts(const GgufSettings& file, Options& o) {
  configure_lfm2(file, o);
  o.experts(sigmoid_experts(file, true).correction(is_corrected(file)));
  set_first_dense(file, o);
}

GgufRecipes lfm2_recipes(const GgufSettings&) {
  return {one_part("token_embd_norm.weight", "model.norm.weight"),
          one_part("shortconv.conv.weight", "self_attn.conv.weight", channels_first)};
}

void configure_granite_hybrid(const GgufSettings& file, Options& o) {
  if (file.is_set("expert_count"))
    configure_granite_experts(file, o);
  else
    configure_granite(file, o);
  set_recurrent_layers(o,
                       ssm_settings(file, "mamba2")
                           .conv_bias(file.some_name_ends_with("self_attn.conv1d.bias"))
                           .bias(file.some_name_ends_with("self_attn.in_proj.bias")),
                       layers_without_keys(file, o));
}

at::Tensor flat(const at::Tensor& x) { return x.flatten(); }

GgufRecipes mamba_recipes(const GgufSettings&) {
  return {one_part("ssm_a", "self_attn.A_log", [](const at::Tensor& x) { return log_decay(x).flatten(); }),
          one_part("ssm_d", "self_attn.D", flat), one_part("ssm_dt.bias", "self_attn.dt_bias"),
          one_part("ssm_conv1d.weight", "self_attn.conv1d.weight", channels_first),
          one_part("ssm_norm.weight", "self_attn.norm.weight", flat)};
}

// Nothing rotates. Heads of recurrent layers are as many as those of attention.
void configure_kimi_linear(const GgufSettings& file, Options& o) {
  set_latent(file, o);
  o.position_embedding("none").rope_scaling(std::nullopt);
  set_recurrent_layers(o,
                       RecurrentSettings()
                           .kind("kimi_delta_attention")
                           .num_v_heads(o.num_heads())
                           .head_k_dim(file.size("kda.head_dim"))
                           .conv_kernel_size(file.size("ssm.conv_kernel")),
                       layers_without_keys(file, o));
  o.experts(grouped_experts(file, true, kSigmoid));
  set_first_dense(file, o);
}

at::Tensor decay_of_gate(const at::Tensor& x) { return log_decay(x).reshape({1, 1, -1, 1}); }

GgufRecipes kimi_recipes(const GgufSettings&) {
  const auto join = [](const std::vector<at::Tensor>& x) {
    return std::vector<at::Tensor>{at::cat({channels_first(x[0]), channels_first(x[1]), channels_first(x[2])})};
  };
  return {latent_halves(),
          {{"ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight"}, {"self_attn.conv1d.weight"}, join},
          one_part("ssm_a", "self_attn.forget_gate.A_log", decay_of_gate),
          one_part("ssm_dt.bias", "self_attn.forget_gate.dt_bias")};
}

// Norms are stored as 1 + weight. Text has the same place in all sections of the rotated dims.
void configure_qwen(const GgufSettings& file, Options& o) {
  set_recurrent_layers(o, ssm_settings(file, "gated_delta_net"), all_but_each(file, o));
  o.scores(ScoreSettings().gate("element"));
  set_rotated_part(file, o);
}

void configure_qwen_experts(const GgufSettings& file, Options& o) {
  configure_qwen(file, o);
  o.experts(plain_experts(file, true).shared_dim(file.size("expert_shared_feed_forward_length")).shared_gate(true));
}

// Queries of a head that its gate follows.
GgufRecipe queries_and_gate(const GgufSettings& file) {
  const auto width = width_of_head(file);
  return two_parts("attn_q.weight", "self_attn.q_proj.weight", "self_attn.gate_proj.weight",
                   file.size("attention.head_count"), width, width);
}

GgufRecipe shared_gate() {
  return one_part("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight",
                  [](const at::Tensor& x) { return x.view({1, -1}); });
}

GgufRecipes qwen3_next_recipes(const GgufSettings& file) {
  const auto groups = file.size("ssm.group_count"), each = file.size("ssm.time_step_rank") / groups;
  return {queries_and_gate(file),
          two_parts("ssm_ba.weight", "self_attn.in_proj_b.weight", "self_attn.in_proj_a.weight", groups, each, each),
          one_part("ssm_a", "self_attn.A_log", log_decay),
          one_part("ssm_dt.bias", "self_attn.dt_bias"),
          one_part("ssm_conv1d.weight", "self_attn.conv1d.weight", channels_first),
          shared_gate()};
}

// The heads of values are stored by turns of those of keys.
GgufRecipes qwen3_5_recipes(const GgufSettings& file) {
  const auto groups = file.size("ssm.group_count"), heads = file.size("ssm.time_step_rank");
  const auto width = file.size("ssm.state_size");
  check_sizes(file.path(), file.file().tensors().size(), 0, groups, width);
  const auto by_head = group_heads(groups, heads), by_column = group_heads(groups, heads, 0, 1);
  const auto behind_keys = group_heads(groups, heads, 2 * groups * width);
  return {queries_and_gate(file),
          one_part("attn_qkv.weight", "self_attn.in_proj_qkv.weight", behind_keys, true),
          one_part("attn_gate.weight", "self_attn.in_proj_z.weight", by_head, true),
          one_part("ssm_alpha.weight", "self_attn.in_proj_a.weight", by_head, true),
          one_part("ssm_beta.weight", "self_attn.in_proj_b.weight", by_head, true),
          one_part("ssm_out.weight", "self_attn.out_proj.weight", by_column),
          one_part("ssm_a", "self_attn.A_log", [=](const at::Tensor& x) { return by_head(log_decay(x)); }),
          one_part("ssm_dt.bias", "self_attn.dt_bias", by_head),
          one_part("ssm_conv1d.weight", "self_attn.conv1d.weight",
                   [=](const at::Tensor& x) { return channels_first(behind_keys(x)); })};
}

GgufRecipes qwen3_5_experts_recipes(const GgufSettings& file) {
  auto recipes = qwen3_5_recipes(file);
  recipes.push_back(shared_gate());
  return recipes;
}

const GgufNames kShort{{"shortconv.in_proj", "self_attn.in_proj"},
                       {"shortconv.out_proj", "self_attn.out_proj"},
                       {"shortconv.conv", "self_attn.conv"}};
const GgufNames kMamba{
    {"ssm_in", "self_attn.in_proj"}, {"ssm_out", "self_attn.out_proj"}, {"ssm_conv1d", "self_attn.conv1d"}};
const GgufNames kDelta{{"attn_gate", "self_attn.in_proj_z"},
                       {"ssm_norm", "self_attn.norm"},
                       {"ssm_out", "self_attn.out_proj"},
                       {"attn_qkv", "self_attn.in_proj_qkv"},
                       {"post_attention_norm", "post_attention_layernorm"}};
const GgufNames kKimiDelta{{"ssm_beta", "self_attn.b_proj"},
                           {"ssm_norm", "self_attn.o_norm"},
                           {"ssm_f_a", "self_attn.forget_gate.f_a_proj"},
                           {"ssm_f_b", "self_attn.forget_gate.f_b_proj"},
                           {"ssm_g_a", "self_attn.g_a_proj"},
                           {"ssm_g_b", "self_attn.g_b_proj"}};

}  // namespace

GgufFamilies gguf_hybrid_families() {
  const std::set<std::string> counts{"attention.head_count_kv"};
  return {
      {.architecture = "lfm2", .configure = configure_lfm2, .names = kShort, .listed = counts, .recipes = lfm2_recipes},
      {.architecture = "lfm2moe",
       .configure = configure_lfm2_experts,
       .names = joined({expert_names(), correction_names(), kShort}),
       .settings = {"expert_count"},
       .listed = counts,
       .recipes = lfm2_recipes},
      {.architecture = "granitehybrid",
       .configure = configure_granite_hybrid,
       .names = joined({expert_names(), shared_names(), kMamba}),
       .interleaved = true,
       .settings = granite_settings(true),
       .listed = counts,
       .recipes = mamba_recipes},
      {.architecture = "qwen35",
       .configure = configure_qwen,
       .names = kDelta,
       .settings = {"full_attention_interval", "nextn_predict_layers", "rope.dimension_count",
                    "rope.dimension_sections"},
       .recipes = qwen3_5_recipes},
      {.architecture = "qwen35moe",
       .configure = configure_qwen_experts,
       .names = joined({expert_names(), shared_names(), kDelta}),
       .settings = {"full_attention_interval", "nextn_predict_layers", "rope.dimension_count",
                    "rope.dimension_sections", "expert_count"},
       .recipes = qwen3_5_experts_recipes},
      {.architecture = "qwen3next",
       .configure = configure_qwen_experts,
       .names = joined({expert_names(), shared_names(), kDelta}),
       .settings = {"full_attention_interval", "nextn_predict_layers", "rope.dimension_count", "expert_count"},
       .recipes = qwen3_next_recipes},
      {.architecture = "kimi-linear",
       .configure = configure_kimi_linear,
       .names = joined({expert_names(), shared_names(), correction_names(), latent_names(), kKimiDelta}),
       .settings = {"expert_count", "attention.value_length", "rope.dimension_count"},
       .listed = counts,
       .recipes = kimi_recipes},
  };
}

}  // namespace attnpack
