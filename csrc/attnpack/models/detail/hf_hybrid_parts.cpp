#include <ATen/ATen.h>

#include <initializer_list>
#include <string_view>
#include <utility>

#include <attnpack/models/detail/hf_parts.h>
#include <attnpack/weights/detail/file_errors.h>

// Where the tensors of families with recurrent layers go.
namespace attnpack {

namespace {

using at::Tensor;
using Options = CausalLMOptions;
using Replacements = std::initializer_list<std::pair<std::string_view, std::string_view>>;

// The linear layers of a gated feed-forward, or of an expert.
const Replacements kGatedLinears = {{".w1.", ".gate_proj."}, {".w3.", ".up_proj."}, {".w2.", ".down_proj."}};

// The name with the first of these words replaced that it holds.
std::string renamed(std::string name, const Replacements& words) {
  for (const auto& [theirs, ours] : words) {
    const auto at = name.find(theirs);
    if (at != name.npos) return name.replace(at, theirs.size(), ours);
  }
  return name;
}

bool holds(const std::string& name, std::string_view word) { return name.find(word) != name.npos; }

// The part of a tensor that others complete, if its name holds one of the words: they follow each other in it.
std::vector<HfPart> piece_of(const std::string& name, std::string_view ours,
                             std::initializer_list<std::string_view> words) {
  int piece = 0;
  for (const auto word : words) {
    const auto at = name.find(word);
    if (at != name.npos) return {{std::string(name).replace(at, word.size(), ours), nullptr, piece}};
    ++piece;
  }
  return {};
}

}  // namespace

std::vector<HfPart> qwen_hybrid_parts(const std::string& name, const Options& o) {
  if (name.starts_with("mtp.")) return {};  // layers that predict a further token
  if (!holds(name, ".self_attn.q_proj.")) {
    return {{renamed(name, {{".linear_attn.", ".self_attn."}, {".shared_expert.", ".shared_experts."}}), nullptr}};
  }
  // Each head's queries are followed by its gate.
  const auto heads = o.num_heads(), dim = *o.head_dim();
  const auto cut = [=](int64_t which) {
    return [=](const Tensor& x) {
      refuse_unless(x.dim() == 2 && x.size(0) == heads * 2 * dim, "it has ", x.dim() ? x.size(0) : 0, " rows, want ",
                    heads * 2 * dim);
      return x.unflatten(0, {heads, 2, dim}).select(1, which).reshape({heads * dim, x.size(1)});
    };
  };
  return {{name, cut(0)}, {renamed(name, {{".q_proj.", ".gate_proj."}}), cut(1)}};
}

std::vector<HfPart> qwen3_5_moe_parts(const std::string& name, const Options& o) {
  return holds(name, ".mlp.experts.") ? packed_experts_parts(name, o) : qwen_hybrid_parts(name, o);
}

// Projections whose rows lie together for each head of keys: its queries, keys, values and gates.
std::vector<HfPart> qwen3_next_parts(const std::string& name, const Options& o) {
  const bool qkvz = holds(name, ".in_proj_qkvz."), ba = holds(name, ".in_proj_ba.");
  if ((!qkvz && !ba) || !o.recurrent()) return qwen_hybrid_parts(name, o);
  const auto& r = *o.recurrent();
  const auto heads = *r.num_k_heads(), each = *r.num_v_heads() / heads, keys = *r.head_k_dim(),
             values = each * *r.head_v_dim();
  const auto rows = qkvz ? 2 * keys + 2 * values : 2 * each;
  const auto cut = [=](int64_t begin, int64_t count) {
    return [=](const Tensor& x) {
      refuse_unless(x.dim() == 2 && x.size(0) == heads * rows, "it has ", x.dim() ? x.size(0) : 0, " rows, want ",
                    heads * rows);
      return x.unflatten(0, {heads, rows}).narrow(1, begin, count).reshape({heads * count, x.size(1)});
    };
  };
  const auto ours = [&](const char* to) {
    return renamed(name, {{".linear_attn.in_proj_qkvz.", to}, {".linear_attn.in_proj_ba.", to}});
  };
  if (ba) return {{ours(".self_attn.in_proj_b."), cut(0, each)}, {ours(".self_attn.in_proj_a."), cut(each, each)}};
  const auto mixed = ours(".self_attn.in_proj_qkv.");
  return {{mixed, cut(0, keys), 0},
          {mixed, cut(keys, keys), 1},
          {mixed, cut(2 * keys, values), 2},
          {ours(".self_attn.in_proj_z."), cut(2 * keys + values, values)}};
}

std::vector<HfPart> olmo_hybrid_parts(const std::string& name, const Options&) {
  auto parts = piece_of(name, ".self_attn.in_proj_qkv.",
                        {".linear_attn.q_proj.", ".linear_attn.k_proj.", ".linear_attn.v_proj."});
  if (!parts.empty()) return parts;
  parts = piece_of(name, ".self_attn.conv1d.",
                   {".linear_attn.q_conv1d.", ".linear_attn.k_conv1d.", ".linear_attn.v_conv1d."});
  if (!parts.empty()) return parts;
  return {{renamed(name, {{".linear_attn.a_proj.", ".self_attn.in_proj_a."},
                          {".linear_attn.b_proj.", ".self_attn.in_proj_b."},
                          {".linear_attn.g_proj.", ".self_attn.in_proj_z."},
                          {".linear_attn.o_proj.", ".self_attn.out_proj."},
                          {".linear_attn.o_norm.", ".self_attn.norm."},
                          {".linear_attn.", ".self_attn."},
                          {".attention_layer_norm.", ".input_layernorm."},
                          {".feedforward_layer_norm.", ".post_attention_layernorm."}}),
           nullptr}};
}

std::vector<HfPart> kimi_linear_parts(const std::string& name, const Options&) {
  auto parts =
      piece_of(name, ".self_attn.conv1d.", {".self_attn.q_conv1d.", ".self_attn.k_conv1d.", ".self_attn.v_conv1d."});
  if (!parts.empty()) return parts;
  auto ours = renamed(name, {{".self_attn.f_a_proj.", ".self_attn.forget_gate.f_a_proj."},
                             {".self_attn.f_b_proj.", ".self_attn.forget_gate.f_b_proj."},
                             {".self_attn.dt_bias", ".self_attn.forget_gate.dt_bias"},
                             {".self_attn.A_log", ".self_attn.forget_gate.A_log"},
                             {".block_sparse_moe.", ".mlp."}});
  if (holds(ours, ".experts.")) ours = renamed(ours, kGatedLinears);
  return {{ours, nullptr}};
}

std::vector<HfPart> lfm2_parts(const std::string& name, const Options&) {
  return {{renamed(renamed(name, kGatedLinears), {{"model.embedding_norm.", "model.norm."},
                                                  {".conv.", ".self_attn."},
                                                  {".self_attn.out_proj.", ".self_attn.o_proj."},
                                                  {".q_layernorm.", ".q_norm."},
                                                  {".k_layernorm.", ".k_norm."},
                                                  {".feed_forward.", ".mlp."},
                                                  {".operator_norm.", ".input_layernorm."},
                                                  {".ffn_norm.", ".post_attention_layernorm."}}),
           nullptr}};
}

// Experts are w1, w3 and w2, or all of them together as in transformers.
std::vector<HfPart> lfm2_moe_parts(const std::string& name, const Options& o) {
  if (holds(name, ".feed_forward.expert_bias"))
    return {{renamed(name, {{".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"}}), nullptr}};
  if (holds(name, ".feed_forward.gate.")) return {{renamed(name, {{".feed_forward.", ".mlp."}}), nullptr}};
  if (!holds(name, ".feed_forward.experts.")) return lfm2_parts(name, o);
  return packed_experts_parts(renamed(renamed(name, {{".feed_forward.", ".mlp."}}), kGatedLinears), o);
}

std::vector<HfPart> bamba_parts(const std::string& name, const Options&) {
  return {{renamed(name, {{"model.final_layernorm.", "model.norm."},
                          {".mamba.", ".self_attn."},
                          {".feed_forward.", ".mlp."},
                          {".pre_ff_layernorm.", ".post_attention_layernorm."}}),
           nullptr}};
}

}  // namespace attnpack
