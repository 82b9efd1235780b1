#include <attnpack/convert/modules.h>

#include <ATen/ATen.h>

#include <attnpack/io/state_dict.h>

namespace attnpack::convert {

namespace {

AttentionWeights weights_of(const Linear& q, const Linear& k, const Linear& v, const Linear& o) {
  return {q->weight, k->weight, v->weight, o->weight, q->bias, k->bias, v->bias};
}

template <typename Target, typename Source>
Target carry_settings(Target target, const Source& source) {
  target.head_dim(source.head_dim())
      .kdim(source.kdim())
      .vdim(source.vdim())
      .bias(source.bias())
      .out_bias(source.out_bias())
      .dropout(source.dropout())
      .causal(source.causal())
      .window(source.window())
      .softcap(source.softcap())
      .sinks(source.sinks())
      .alibi(source.alibi())
      .qk_norm(source.qk_norm())
      .rope(source.rope())
      .scale(source.scale())
      .factory(source.factory());
  target.factory().device = at::kMeta;  // replaced below
  return target;
}

bool consecutive(const std::vector<int64_t>& map, int64_t num_kv_heads) {
  const auto num_heads = static_cast<int64_t>(map.size());
  return num_heads % num_kv_heads == 0 && map == kv_head_of_queries(num_heads, num_kv_heads, std::nullopt);
}

template <typename Impl>
MergedHeads merge_module(const Impl& module, int64_t num_kv_heads, const ToGqaOptions& options) {
  const auto& o = module.options;
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
                            .key_norm(o.qk_norm()));
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
  for (const auto& item : module.named_parameters()) {
    auto& tensor = tensors[item.key()];
    tensor = tensor.detach().clone().set_requires_grad(item.value().requires_grad());
  }
  return tensors;
}

template <typename Holder, typename Impl>
Holder rebuild(Holder made, const Impl& module, const AttentionWeights& merged) {
  assign_state_dict(*made, own_parameters(module, merged));
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
  auto target =
      carry_settings(GroupedQueryAttentionOptions(source.embed_dim(), source.num_heads(), num_kv_heads), source);
  if (!consecutive(merged.head_map, num_kv_heads)) target.head_map(merged.head_map);
  return rebuild(GroupedQueryAttention(target), *module, merged.weights);
}

template <typename Impl>
MultiQueryAttention to_mqa(const torch::nn::ModuleHolder<Impl>& module, const ToGqaOptions& options) {
  const auto merged = merge_module(*module, 1, options);
  const auto& source = module->options;
  return rebuild(
      MultiQueryAttention(carry_settings(MultiQueryAttentionOptions(source.embed_dim(), source.num_heads()), source)),
      *module, merged.weights);
}

#define ATTNPACK_CONVERT(Impl)                                                                               \
  template GroupedQueryAttention to_gqa(const torch::nn::ModuleHolder<Impl>&, int64_t, const ToGqaOptions&); \
  template MultiQueryAttention to_mqa(const torch::nn::ModuleHolder<Impl>&, const ToGqaOptions&);
ATTNPACK_CONVERT(MultiHeadAttentionImpl)
ATTNPACK_CONVERT(GroupedQueryAttentionImpl)
ATTNPACK_CONVERT(MultiQueryAttentionImpl)
#undef ATTNPACK_CONVERT

}  // namespace attnpack::convert
