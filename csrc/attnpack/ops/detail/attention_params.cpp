#include <ATen/ATen.h>

#include <attnpack/core/check.h>
#include <attnpack/core/dropout.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/contiguous_rows.h>
#include <attnpack/ops/detail/empty_result.h>
#include <attnpack/ops/detail/extremes.h>

namespace attnpack {

DType kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return DType::kFloat64;
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBool:
      return DType::kBool;
    default:
      ATTNPACK_CHECK(false, "mask has dtype ", dtype, ", wants bool, float64, float32, bfloat16 or float16");
  }
}

Strides kernel_strides(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}; }

Tensor unit_last_stride(const Tensor& t) {
  if (t.size(-1) <= 1 || t.stride(-1) == 1) return t;
  return t.is_cpu() && t.stride(-2) == 1 ? contiguous_rows(t) : t.contiguous();
}

PreparedAttention prepare_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const AttentionArguments& args) {
  PreparedAttention r;
  AttentionParams& p = r.params;
  r.query = unit_last_stride(query);
  r.key = unit_last_stride(key);
  r.value = unit_last_stride(value);
  p.batch = query.size(0);
  p.num_heads = query.size(1);
  p.num_kv_heads = key.size(1);
  p.q_len = query.size(2);
  p.kv_len = key.size(2);
  p.head_dim = query.size(3);
  p.v_head_dim = value.size(3);
  p.dtype = kernel_dtype(query.scalar_type());
  p.query = r.query.const_data_ptr();
  p.key = r.key.const_data_ptr();
  p.value = r.value.const_data_ptr();
  p.query_strides = kernel_strides(r.query);
  p.key_strides = kernel_strides(r.key);
  p.value_strides = kernel_strides(r.value);
  p.scale = args.scale ? *args.scale : default_scale(p.head_dim);
  p.softcap = usable_softcap(args.softcap, accumulation_type(query.scalar_type()));
  p.causal = args.causal;
  p.window_left = near_window(args.window[0]);
  p.window_right = near_window(args.window[1]);
  p.chunk = args.chunk.value_or(0);
  if (args.dropout_p > 0 && !args.dropout_seed->is_cpu()) {  // reading it here would wait for the device
    r.dropout_seed = *args.dropout_seed;
    p.dropout_seed_at = r.dropout_seed.const_data_ptr<int64_t>();
    set_dropout(p, args.dropout_p, 0);
  } else if (args.dropout_p > 0) {
    set_dropout(p, args.dropout_p, static_cast<uint64_t>(args.dropout_seed->item<int64_t>()));
  }
  if (args.head_map) {
    r.groups = group_heads(*args.head_map, p.num_kv_heads);
    p.group_start = r.groups.start.data();
    p.group_heads = r.groups.heads.data();
  }
  if (args.mask) {
    r.mask = args.mask->expand({p.batch, p.num_heads, p.q_len, p.kv_len});
    p.mask = r.mask.const_data_ptr();
    p.mask_dtype = kernel_dtype(r.mask.scalar_type());
    p.mask_strides = kernel_strides(r.mask);
  }
  p.q_offset = near_offset(args.q_offset.expect_int(), args.window[0], args.window[1]);
  if (args.q_offsets) {
    r.q_offsets = args.q_offsets->to(at::kLong);
    // first_position does the rest. On CUDA a call of its own would cost as much as the kernel.
    if (r.q_offsets.is_cpu() ? has_far_offset(r.q_offsets) : std::max(args.window[0], args.window[1]) > kFar)
      r.q_offsets = near_offset(r.q_offsets, args.window[0], args.window[1]);
    r.q_offsets = r.q_offsets.contiguous();
    p.q_offsets = r.q_offsets.const_data_ptr<int64_t>();
  }
  if (args.kv_lens) {
    r.kv_lens = args.kv_lens->to(at::kLong).contiguous();
    p.kv_lens = r.kv_lens.const_data_ptr<int64_t>();
    if (args.kv_lens->is_cpu()) check_kv_lens_values(p.kv_lens, p.batch, p.kv_len);
  }
  const auto as_double = [](const Tensor& t) { return t.detach().to(at::kDouble).contiguous(); };
  if (args.sinks) p.sinks = (r.sinks = as_double(*args.sinks)).const_data_ptr<double>();
  if (args.alibi_slopes) p.alibi_slopes = (r.alibi_slopes = as_double(*args.alibi_slopes)).const_data_ptr<double>();
  return r;
}

AttentionResult make_outputs(PreparedAttention& prepared, const Tensor& query) {
  AttentionParams& p = prepared.params;
  const Tensor out = make_laid_as(query, at::IntArrayRef{p.batch, p.num_heads, p.q_len, p.v_head_dim},
                                  [&](at::IntArrayRef sizes) { return empty_result(sizes, query.options()); });
  const Tensor lse =
      empty_result({p.batch, p.num_heads, p.q_len}, query.options().dtype(accumulation_type(query.scalar_type())));
  p.out = out.mutable_data_ptr();
  p.out_strides = kernel_strides(out);
  p.lse = lse.mutable_data_ptr();
  return {out, lse};
}

PreparedBackward prepare_backward(const PreparedAttention& forward, const Tensor& grad_out,
                                  const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const Tensor& out, const Tensor& lse, bool mask_gradient) {
  PreparedBackward r;
  AttentionBackwardParams& bp = r.params;
  AttentionParams& p = bp.forward = forward.params;
  const auto accumulation = accumulation_type(query.scalar_type());
  r.lse = lse.contiguous();
  r.grad_out = unit_last_stride(grad_out);
  Tensor products = grad_out.to(accumulation).mul(out);
  // The output of a row without keys is 0, whatever its sink is. So no gradient, not even NaN, reaches the sink from
  // that row.
  if (p.sinks) products = products.masked_fill(out == 0, 0);
  r.delta = products.sum(-1);
  if (grad_lse) {
    r.grad_lse = grad_lse->to(accumulation).contiguous();
    r.delta = r.delta.sub(r.grad_lse);
    bp.grad_lse = r.grad_lse.const_data_ptr();
  }
  r.delta = r.delta.contiguous();
  p.lse = r.lse.data_ptr();
  bp.grad_out = r.grad_out.const_data_ptr();
  bp.grad_out_strides = kernel_strides(r.grad_out);
  bp.delta = r.delta.const_data_ptr();
  r.grad_query = empty_laid_as(query);
  r.grad_key = empty_laid_as(key);
  r.grad_value = empty_laid_as(value);
  bp.grad_query = r.grad_query.mutable_data_ptr();
  bp.grad_key = r.grad_key.mutable_data_ptr();
  bp.grad_value = r.grad_value.mutable_data_ptr();
  bp.grad_query_strides = kernel_strides(r.grad_query);
  bp.grad_key_strides = kernel_strides(r.grad_key);
  bp.grad_value_strides = kernel_strides(r.grad_value);
  if (mask_gradient) {
    r.grad_scores = at::zeros({p.batch, p.num_heads, p.q_len, p.kv_len}, query.options().dtype(accumulation));
    bp.grad_scores = r.grad_scores.mutable_data_ptr();
  }
  return r;
}

Tensor sink_terms(const Tensor& sinks, const Tensor& lse, const Tensor& delta) {
  // The sink's probability exp(sink - lse) stands only in the denominator. So its score has the gradient -P_sink * D.
  // In a row without keys lse is the sink itself, finite or not.
  const Tensor sink = sinks.to(delta.scalar_type()).view({-1, 1});
  const Tensor probability =
      (sink - lse).exp().masked_fill(lse == sink, 1).masked_fill(lse == -std::numeric_limits<double>::infinity(), 0);
  return probability.mul(delta).neg().masked_fill(delta == 0, 0);
}

}  // namespace attnpack
