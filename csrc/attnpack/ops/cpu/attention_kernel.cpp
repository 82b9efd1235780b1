#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/cpu/loop_threads.h>
#include <attnpack/ops/cpu/selected_keys.h>
#include <attnpack/ops/cpu/sums.h>
#include <attnpack/ops/cpu/work_units.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

AttentionResult attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                              const AttentionArguments& args) {
  check_attention(query, key, value, args);
  PreparedAttention prepared = prepare_attention(query, key, value, args);
  if (args.key_index) return attend_selected_keys(prepared, query, args);
  const AttentionResult result = make_outputs(prepared, query);
  run_forward(kernels_in_use(), {&prepared.params, 1}, kLoopThreads);
  return result;
}

// Runs the kernels of the gradients of query, key and value, over all keys.
void differentiate_all_keys(PreparedBackward& r) {
  AttentionBackwardParams& bp = r.params;
  const AttentionParams& p = bp.forward;
  const Tiling t = tile_rows(p);
  if (t.kv_heads * p.kv_len == 0) r.grad_query.zero_();
  const Tensor sums = at::empty({p.batch * p.num_heads * p.q_len, sums_width(p.head_dim)}, r.delta.options());
  const Tensor done = at::zeros({t.kv_heads * t.tiles}, at::kInt);
  bp.grad_query_sums = sums.mutable_data_ptr();
  bp.blocks_done = done.mutable_data_ptr<int32_t>();
  bp.tiles = t.tiles;
  run_backward(kernels_in_use(), {&bp, 1}, kLoopThreads);
}

AttentionGradients attention_backward_cpu(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                          const Tensor& query, const Tensor& key, const Tensor& value,
                                          const Tensor& out, const Tensor& lse, const AttentionArguments& args,
                                          bool mask_gradient, bool sinks_gradient) {
  check_attention_backward(grad_out, grad_lse, query, key, value, out, lse, args, mask_gradient, sinks_gradient);
  const PreparedAttention prepared = prepare_attention(query, key, value, args);
  PreparedBackward r = prepare_backward(prepared, grad_out, grad_lse, query, key, value, out, lse, mask_gradient);
  args.key_index ? differentiate_selected_keys(r, query, args) : differentiate_all_keys(r);
  Tensor grad_mask = at::empty({0}, query.options()), grad_sinks = at::empty({0}, query.options());
  if (mask_gradient)
    grad_mask = (args.mask->numel() == 1 ? sum_in_order(r.grad_scores).view(args.mask->sizes())
                                         : r.grad_scores.sum_to_size(args.mask->sizes()))
                    .to(args.mask->scalar_type());
  if (sinks_gradient) grad_sinks = sinks_gradient_in_order(*args.sinks, lse, r.delta);
  return {r.grad_query, r.grad_key, r.grad_value, grad_mask, grad_sinks};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("attention", attnpack::from_schema<attnpack::attention_cpu>);
  m.impl("attention_backward", attnpack::from_schema<attnpack::attention_backward_cpu>);
}
