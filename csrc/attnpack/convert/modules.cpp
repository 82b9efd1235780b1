#include <attnpack/convert/modules.h>

#include <ATen/ATen.h>

#include <attnpack/convert/detail/joined_rope.h>
#include <attnpack/convert/detail/latent.h>
#include <attnpack/convert/detail/model_checks.h>
#include <attnpack/core/check.h>
#include <attnpack/modules/state_dict.h>

#include <cmath>
#include <map>
#include <string_view>
#include <typeinfo>

namespace attnpack::convert {

namespace {

AttentionWeights weights_of(const Linear& q, const Linear& k, const Linear& v, const Linear& o) {
  return {q->weight, k->weight, v->weight, o->weight, q->bias, k->bias, v->bias};
}

// The options of a layer by name, whatever their types.
struct AnyOption {
  const std::type_info* type;
  const void* value;
};
using AnyOptions = std::map<std::string_view, AnyOption>;
template <typename Options>
AnyOptions any_options(const Options& options) {
  AnyOptions all;
  Options::for_each_option(options, [&](const char* name, const auto& value) { all[name] = {&typeid(value), &value}; });
  return all;
}

// target with the options of source that it has too, but for the head counts and the head map.
template <typename Target>
Target carry_options(Target target, const AnyOptions& source) {
  Target::for_each_option(target, [&](const std::string_view name, auto& value) {
    if (name == "num_heads" || name == "num_kv_heads" || name == "head_map") return;
    const auto found = source.find(name);
    if (found == source.end() || *found->second.type != typeid(value)) return;
    value = *static_cast<const std::decay_t<decltype(value)>*>(found->second.value);
  });
  target.factory().device = at::kMeta;  // replaced below
  return target;
}

bool consecutive(const std::vector<int64_t>& map, int64_t num_kv_heads) {
  const auto num_heads = static_cast<int64_t>(map.size());
  return num_heads % num_kv_heads == 0 && map == kv_head_of_queries(num_heads, num_kv_heads, std::nullopt);
}

// Refuses a layer without the projections that a conversion reads.
template <typename Options>
void check_has_projections(const Options& o) {
  ATTNPACK_CHECK(o.own_keys(),
                 "own_keys: got a layer without, which reads the keys of another one; convert that one, and leave this "
                 "one as it is");
  ATTNPACK_CHECK(!o.keys_as_values(),
                 "keys_as_values: got a layer with it, conversion wants k_proj and v_proj apart; give it a v_proj with "
                 "the weights of k_proj first");
  ATTNPACK_CHECK(!o.q_lora_rank(), "q_lora_rank: got a layer with ", o.q_lora_rank().value_or(0),
                 ", conversion wants a q_proj; multiply q_b_proj by q_a_proj, if no norm stands between them");
}

template <typename Impl>
MergedHeads merge_module(const Impl& module, int64_t num_kv_heads, const ToGqaOptions& options) {
  const auto& o = module.options;
  refuse_shared_norm(o.qk_norm().all_heads());
  check_has_projections(o);
  ATTNPACK_CHECK(
      o.gate() != "element" || options.method() != "aligned",
      "gate: got 'element', which gates each number of a head, together with method 'aligned', which rotates "
      "these numbers; take 'mean'");
  return merge_kv_heads(weights_of(module.q_proj, module.k_proj, module.v_proj, module.o_proj),
                        MergeOptions(o.num_heads(), o.num_kv_heads(), num_kv_heads)
                            .head_map(o.head_map())
                            .method(options.method())
                            .window(options.window())
                            .groups(options.groups())
                            .seed(options.seed())
                            .calibration(options.calibration())
                            .rope_dim(module.rope ? module.rope->options.dim() : 0)
                            .interleaved(module.rope && module.rope->options.interleaved())
                            .key_norm(bool(o.qk_norm())));
}

// Parameters by name: the merged ones, and copies of the others.
StateDict own_parameters(const torch::nn::Module& module, const AttentionWeights& merged) {
  auto tensors = state_dict(module);
  const auto put = [&](const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined()) tensors[name] = tensor;
  };
  put("q_proj.weight", merged.q), put("q_proj.bias", merged.q_bias), put("o_proj.weight", merged.o);
  put("k_proj.weight", merged.k), put("k_proj.bias", merged.k_bias);
  put("v_proj.weight", merged.v), put("v_proj.bias", merged.v_bias);
  for (auto& [name, tensor] : tensors) tensor = tensor.detach().clone();
  return tensors;
}

// Refuses settings that latent attention does not have.
template <typename Impl>
void check_has_latent_form(const Impl& module) {
  const auto& o = module.options;
  const auto lacks = [](bool given, const char* name) {
    ATTNPACK_CHECK(!given, name,
                   ": got a layer with it, which latent attention does not have; conversion would lose it");
  };
  lacks(o.window().has_value() && *o.window() != Window{-1, -1}, "window");
  lacks(o.chunk().has_value(), "chunk");
  lacks(o.softcap() != 0, "softcap");
  lacks(o.sinks(), "sinks");
  lacks(o.alibi(), "alibi");
  lacks(bool(o.qk_norm()), "qk_norm");
  check_has_projections(o);
  for (const auto& width : {o.kdim(), o.vdim()}) {
    ATTNPACK_CHECK(!width || *width == o.embed_dim(), "kdim, vdim: got a layer with ", *width, ", want embed_dim ",
                   o.embed_dim(), ": one latent makes keys and values of it");
  }
}

template <typename Holder, typename Impl>
Holder rebuild(Holder made, const Impl& module, const AttentionWeights& merged) {
  assign_state_dict(*made, own_parameters(module, merged));
  copy_requires_grad(module, *made);
  made->options.factory(module.options.factory());
  made->train(module.is_training());
  return made;
}

}  // namespace

template <typename Impl>
GroupedQueryAttention to_gqa(const torch::nn::ModuleHolder<Impl>& module, int64_t num_kv_heads,
                             const ToGqaOptions& options) {
  const auto merged = merge_module(*module, num_kv_heads, options);
  const auto& source = module->options;
  auto target = carry_options(GroupedQueryAttentionOptions(source.embed_dim(), source.num_heads(), num_kv_heads),
                              any_options(source));
  if (!consecutive(merged.head_map, num_kv_heads)) target.head_map(merged.head_map);
  return rebuild(GroupedQueryAttention(target), *module, merged.weights);
}

template <typename Impl>
MultiQueryAttention to_mqa(const torch::nn::ModuleHolder<Impl>& module, const ToGqaOptions& options) {
  const auto merged = merge_module(*module, 1, options);
  const auto& source = module->options;
  return rebuild(MultiQueryAttention(carry_options(MultiQueryAttentionOptions(source.embed_dim(), source.num_heads()),
                                                   any_options(source))),
                 *module, merged.weights);
}

template <typename Impl>
MultiHeadLatentAttention to_mla(const torch::nn::ModuleHolder<Impl>& module, int64_t kv_lora_rank,
                                const ToMlaOptions& options) {
  const auto& source = module->options;
  check_has_latent_form(*module);
  const auto* rope = module->rope ? &module->rope->settings : nullptr;
  ATTNPACK_CHECK(!options.ids().defined(), "ids: got some for a single layer, want calibration, the layer's input");
  ATTNPACK_CHECK(!options.rope_dim() || (rope && rope->growth == 0), "rope_dim: got ", options.rope_dim().value_or(0),
                 ", want none for a layer without RoPE, or whose frequencies grow with the text");
  const auto original = weights_of(module->q_proj, module->k_proj, module->v_proj, module->o_proj);
  auto latent = LatentOptions(source.num_heads(), source.num_kv_heads(), kv_lora_rank)
                    .head_map(source.head_map())
                    .inv_freq(rope ? rope->inv_freq : std::vector<double>())
                    .interleaved(rope && rope->interleaved)
                    .rope_factor(rope ? rope->factor : 1.0)
                    .length(options.length())
                    .causal(source.causal())
                    .calibration(options.calibration());
  if (options.rope_dim()) latent.pairs(choose_pairs(rotation_losses(original, latent), *options.rope_dim()));
  const auto weights = factorise_latent(original, latent);
  const auto head_dim = *source.head_dim(), rotated = weights.kv_a.size(0) - kv_lora_rank;
  const auto out_bias = module->o_proj->bias;
  const bool bias = weights.q_bias.defined() || weights.kv_a_bias.defined() || out_bias.defined();
  auto target =
      carry_options(MultiHeadLatentAttentionOptions(source.embed_dim(), source.num_heads()), any_options(source))
          .kv_lora_rank(kv_lora_rank)
          .qk_nope_head_dim(head_dim)
          .qk_rope_head_dim(rotated)
          .v_head_dim(head_dim)
          .latent_norm(false)
          .bias(bias)
          .scale(source.scale().value_or(1.0 / std::sqrt(static_cast<double>(head_dim))) /
                 (rope ? rope->softmax_factor : 1.0));
  if (weights.q_bias.defined()) target.q_lora_rank(weights.q.size(0));
  if (options.rope_dim()) {
    auto joined = module->rope->options;
    joined.scaling(joined_scaling(*rope, latent.pairs(), joined.base(), joined.max_positions())).dim(rotated);
    target.rope(RotaryEmbedding(joined));
  }
  target.factory().dtype = weights.q.scalar_type();
  MultiHeadLatentAttention made(target);
  made->options.factory(source.factory());

  StateDict state{{"kv_a_proj_with_mqa.weight", weights.kv_a},
                  {"kv_b_proj.weight", weights.kv_b},
                  {"o_proj.weight", module->o_proj->weight.detach().clone()}};
  const auto or_zeros = [](const at::Tensor& given, const at::Tensor& weight) {
    return given.defined() ? given.detach().clone()
                           : at::zeros({weight.size(0)}, weight.options().requires_grad(false));
  };
  if (module->gate_proj) state["gate_proj.weight"] = module->gate_proj->weight.detach().clone();
  if (bias) {
    state["kv_a_proj_with_mqa.bias"] = or_zeros(weights.kv_a_bias, weights.kv_a);
    state["o_proj.bias"] = or_zeros(out_bias, module->o_proj->weight);
  }
  if (weights.q_bias.defined()) {
    state["q_a_proj.weight"] = weights.q;
    state["q_a_proj.bias"] = weights.q_bias;
    state["q_b_proj.weight"] = at::eye(weights.q.size(0), weights.q.options());
  } else {
    state["q_proj.weight"] = weights.q;
  }
  assign_state_dict(*made, state);
  made->train(module->is_training());
  return made;
}

#define ATTNPACK_CONVERT(Impl)                                                                               \
  template GroupedQueryAttention to_gqa(const torch::nn::ModuleHolder<Impl>&, int64_t, const ToGqaOptions&); \
  template MultiQueryAttention to_mqa(const torch::nn::ModuleHolder<Impl>&, const ToGqaOptions&);            \
  template MultiHeadLatentAttention to_mla(const torch::nn::ModuleHolder<Impl>&, int64_t, const ToMlaOptions&);
ATTNPACK_CONVERT(MultiHeadAttentionImpl)
ATTNPACK_CONVERT(GroupedQueryAttentionImpl)
ATTNPACK_CONVERT(MultiQueryAttentionImpl)
#undef ATTNPACK_CONVERT

}  // namespace attnpack::convert
