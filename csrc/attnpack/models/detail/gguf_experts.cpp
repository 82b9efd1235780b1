#include <attnpack/models/detail/gguf_configure.h>
#include <attnpack/models/detail/hf_config.h>
#include <attnpack/models/detail/hf_families.h>

#include <algorithm>

namespace attnpack {

namespace {

void check_count(const GgufSettings& file, const char* key, int64_t count) {
  file.check(count <= kMostExperts, file.full(key), " is ", count, ", wants at most ", kMostExperts, kDamaged);
}

MixtureOfExpertsOptions usual_experts(const GgufSettings& file, bool normalize) {
  const auto used = file.size("expert_used_count"), count = file.size("expert_count");
  check_count(file, "expert_count", count);
  const auto* key = "expert_feed_forward_length";
  const auto width = file.is_set(key) ? file.size(key) : std::max<int64_t>(file.size("feed_forward_length") / used, 1);
  return MixtureOfExpertsOptions(1, file.size(key, width), count, used).normalize(normalize);
}

MixtureOfExpertsOptions without_groups(const GgufSettings& file, bool normalize) {
  file.refuse({"expert_shared_count", "expert_group_count", "expert_group_used_count"}, {0, 1});
  file.refuse({"expert_weights_scale"}, {0, 1});
  const auto* key = "expert_weights_norm";
  file.check(file.is_usual(key, normalize), file.full(key), " = ", quoted(file.get(key)),
             " is not supported yet, wants ", normalize ? "True" : "False", " or no such key", kOtherModel);
  return usual_experts(file, normalize);
}

}  // namespace

MixtureOfExpertsOptions plain_experts(const GgufSettings& file, bool normalize) {
  file.refuse({"expert_gating_func"}, {kSoftmax, kSoftmaxOfChosen});
  return without_groups(file, normalize);
}

MixtureOfExpertsOptions sigmoid_experts(const GgufSettings& file, bool normalize) {
  file.refuse({"expert_gating_func"}, {kSigmoid});
  return without_groups(file, normalize).scores("sigmoid");
}

MixtureOfExpertsOptions wide_experts(const GgufSettings& file) {
  const auto width = file.size("expert_feed_forward_length", file.size("feed_forward_length"));
  return plain_experts(file, true).hidden_dim(width);
}

MixtureOfExpertsOptions grouped_experts(const GgufSettings& file, bool normalize, int64_t gating) {
  file.refuse({"expert_gating_func"}, {kSoftmax, kSigmoid});
  auto options = usual_experts(file, file.is_on("expert_weights_norm", normalize));
  const auto width = file.size("expert_feed_forward_length");
  options.scores(file.size("expert_gating_func", gating) == kSigmoid ? "sigmoid" : "softmax")
      .scaling(file.number("expert_weights_scale", 1))
      .num_groups(file.size("expert_group_count", 1))
      .top_groups(file.size("expert_group_used_count", 1))
      .correction(is_corrected(file));
  if (const auto shared = file.size_if_set("expert_shared_count")) {
    check_count(file, "expert_shared_count", *shared);
    options.shared_dim(width * *shared);
  }
  return options;
}

bool is_corrected(const GgufSettings& file) { return file.some_name_ends_with("e_score_correction_bias"); }

void set_first_dense(const GgufSettings& file, CausalLMOptions& options) {
  const auto dense = file.size_if_set("leading_dense_block_count").value_or(0);
  set_dense_layers(options, [=](int64_t layer) { return layer < dense; });
}

GgufNames joined(std::initializer_list<GgufNames> names) {
  GgufNames all;
  for (const auto& each : names) all.insert(each.begin(), each.end());
  return all;
}

GgufNames expert_names() {
  return {{"ffn_gate_inp", "mlp.gate"},
          {"ffn_gate_exps", "mlp.experts.*.gate_proj"},
          {"ffn_up_exps", "mlp.experts.*.up_proj"},
          {"ffn_down_exps", "mlp.experts.*.down_proj"}};
}

GgufNames shared_names() {
  return {{"ffn_gate_shexp", "mlp.shared_experts.gate_proj"},
          {"ffn_up_shexp", "mlp.shared_experts.up_proj"},
          {"ffn_down_shexp", "mlp.shared_experts.down_proj"}};
}

GgufNames correction_names() { return {{"exp_probs_b", "mlp.gate.e_score_correction_bias"}}; }

GgufNames latent_names() {
  return {{"attn_q_a", "self_attn.q_a_proj"},
          {"attn_q_a_norm", "self_attn.q_a_layernorm"},
          {"attn_q_b", "self_attn.q_b_proj"},
          {"attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"},
          {"attn_kv_a_norm", "self_attn.kv_a_layernorm"},
          {"attn_kv_b", "self_attn.kv_b_proj"}};
}

GgufNames sandwich_names() {
  return {{"post_attention_norm", "post_attention_layernorm"},
          {"ffn_norm", "pre_feedforward_layernorm"},
          {"post_ffw_norm", "post_feedforward_layernorm"}};
}

}  // namespace attnpack
