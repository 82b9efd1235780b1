#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cpu/attention_params.h>
#include <attnpack/ops/cpu/attention_units.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/cpu/parallel.h>

namespace attnpack {
namespace {

// Hands units to torch's threads.
constexpr auto kTorchThreads = [](int64_t count, double work, size_t scratch_bytes, auto&& unit) {
  for_each_unit(count, work, scratch_bytes, unit);
};

AttentionResult attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTENTION_PARAMS) {
  check_attention(query, key, value, ATTNPACK_ATTENTION_ARGS);
  PreparedAttention prepared = prepare_attention(query, key, value, ATTNPACK_ATTENTION_ARGS);
  AttentionParams& p = prepared.params;
  const Tensor out = empty_heads_inside({p.batch, p.num_heads, p.q_len, p.v_head_dim}, query.options());
  const Tensor lse =
      at::empty({p.batch, p.num_heads, p.q_len}, query.options().dtype(accumulation_type(query.scalar_type())));
  p.out = out.mutable_data_ptr();
  p.out_strides = kernel_strides(out);
  p.lse = lse.mutable_data_ptr();
  run_forward(kernels_in_use(), p, kTorchThreads);
  return {out, lse};
}

// The sum of all elements, [1]. at::sum splits a sum to one number over the threads, and rounds by their number.
Tensor sum_in_order(const Tensor& x) {
  const Tensor terms = x.to(at::kDouble).contiguous();
  double sum = 0;
  for (int64_t i = 0; i < terms.numel(); ++i) sum += terms.const_data_ptr<double>()[i];
  return at::full({1}, sum, x.options());
}

AttentionGradients attention_backward_cpu(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                          const Tensor& query, const Tensor& key, const Tensor& value,
                                          const Tensor& out, const Tensor& lse, ATTNPACK_ATTENTION_PARAMS,
                                          bool mask_gradient, bool sinks_gradient) {
  PreparedAttention prepared = prepare_attention(query, key, value, ATTNPACK_ATTENTION_ARGS);
  AttentionBackwardParams bp{};
  AttentionParams& p = bp.forward = prepared.params;
  const auto accumulation = accumulation_type(query.scalar_type());
  const Tensor lse_rows = lse.contiguous(), gradient = unit_last_stride(grad_out.to(query.scalar_type()));
  // D = rowsum(dO * O) - dlse: what every score of a row has in common.
  Tensor delta = grad_out.to(accumulation).mul(out).sum(-1);
  if (grad_lse) delta = delta.sub(*grad_lse);
  delta = delta.contiguous();
  p.lse = lse_rows.data_ptr();
  bp.grad_out = gradient.const_data_ptr();
  bp.grad_out_strides = kernel_strides(gradient);
  bp.delta = delta.const_data_ptr();
  const auto like = [](const Tensor& t) { return empty_heads_inside(t.sym_sizes(), t.options()); };
  const Tensor grad_query = like(query), grad_key = like(key), grad_value = like(value);
  bp.grad_query = grad_query.mutable_data_ptr();
  bp.grad_key = grad_key.mutable_data_ptr();
  bp.grad_value = grad_value.mutable_data_ptr();
  bp.grad_query_strides = kernel_strides(grad_query);
  bp.grad_key_strides = kernel_strides(grad_key);
  bp.grad_value_strides = kernel_strides(grad_value);
  Tensor grad_scores;
  if (mask_gradient) {
    grad_scores = at::zeros({p.batch, p.num_heads, p.q_len, p.kv_len}, query.options().dtype(accumulation));
    bp.grad_scores = grad_scores.mutable_data_ptr();
  }
  const Tiling t = tile_rows(p);
  if (t.kv_heads * p.kv_len == 0) grad_query.zero_();
  const Tensor sums =
      at::empty({p.batch * p.num_heads * p.q_len, sums_width(p.head_dim)}, query.options().dtype(accumulation));
  const Tensor done = at::zeros({t.kv_heads * t.tiles}, at::kInt);
  bp.grad_query_sums = sums.mutable_data_ptr();
  bp.blocks_done = done.mutable_data_ptr<int32_t>();
  bp.tiles = t.tiles;
  run_backward(kernels_in_use(), bp, kTorchThreads);
  Tensor grad_mask = at::empty({0}, query.options()), grad_sinks = at::empty({0}, query.options());
  if (mask_gradient)
    grad_mask =
        (mask->numel() == 1 ? sum_in_order(grad_scores).view(mask->sizes()) : grad_scores.sum_to_size(mask->sizes()))
            .to(mask->scalar_type());
  if (sinks_gradient) {
    // The sink's probability exp(sink - lse) takes part in nothing but the denominator: its score gets -P_sink * D.
    const Tensor probability = (sinks->to(accumulation).view({-1, 1}) - lse)
                                   .exp()
                                   .masked_fill(lse == -std::numeric_limits<double>::infinity(), 0);
    const Tensor terms = probability.mul(delta).neg();
    grad_sinks = (p.num_heads == 1 ? sum_in_order(terms) : terms.sum({0, 2})).to(sinks->scalar_type());
  }
  return {grad_query, grad_key, grad_value, grad_mask, grad_sinks};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("attention", attnpack::attention_cpu);
  m.impl("attention_backward", attnpack::attention_backward_cpu);
}
