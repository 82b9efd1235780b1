#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cpu/attention_params.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/cpu/parallel.h>

namespace attnpack {
namespace {

struct Tiling {
  int64_t kv_heads, rows, tiles;  // (batch, kv head) pairs; most rows of one; tiles of rows of one
  double work;                    // multiply-adds of one product, roughly
};

Tiling tile_rows(const AttentionParams& p) {
  int64_t group = p.num_kv_heads ? group_size(p, 0) : 0;
  for (int64_t h = 1; p.group_start && h < p.num_kv_heads; ++h) group = std::max(group, group_size(p, h));
  const int64_t rows = group * p.q_len;
  return {p.batch * p.num_kv_heads, rows, (rows + kTileQueryRows - 1) / kTileQueryRows,
          static_cast<double>(p.batch) * p.num_heads * p.q_len * p.kv_len * (p.head_dim + p.v_head_dim)};
}

// Calls f(b, kv_head, rows) for tile `index` counted from the last (with causality the longest come first).
template <class F>
void with_row_tile(const AttentionParams& p, const Tiling& t, int64_t index, F&& f) {
  const int64_t b = index / t.tiles / p.num_kv_heads, kv_head = index / t.tiles % p.num_kv_heads;
  const int64_t begin = (t.tiles - 1 - index % t.tiles) * kTileQueryRows;
  const Range rows{begin, std::min(begin + kTileQueryRows, group_size(p, kv_head) * p.q_len)};
  if (!rows.empty()) f(b, kv_head, rows);
}

void run_prefill(const AttentionParams& p, const Tiling& t) {
  const auto& kernels = kernels_in_use();
  for_each_unit(t.kv_heads * t.tiles, t.work, kernels.prefill_scratch(p), [&](int64_t index, void* scratch) {
    with_row_tile(p, t, index,
                  [&](int64_t b, int64_t kv_head, Range rows) { kernels.prefill(p, b, kv_head, rows, scratch); });
  });
}

// Few rows a kv head: its keys are cut into ranges, whose results are joined at the end.
void run_ranges(const AttentionParams& p, const Tiling& t) {
  const auto& kernels = kernels_in_use();
  const int64_t ranges = std::max<int64_t>(1, (p.kv_len + kRangeKeys - 1) / kRangeKeys);
  const size_t row_bytes = (p.v_head_dim + 2) * (p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
  const Scratch<1> partials(t.kv_heads * ranges * t.rows * row_bytes);
  const auto partial = [&](int64_t head, int64_t range) {
    const int64_t rows = group_size(p, head % p.num_kv_heads) * p.q_len;
    return static_cast<char*>(partials.data()) + (head * ranges * t.rows + range * rows) * row_bytes;
  };
  for_each_unit(t.kv_heads * ranges, t.work, kernels.decode_scratch(p), [&](int64_t unit, void* scratch) {
    const int64_t head = unit / ranges, range = unit % ranges;
    kernels.decode(p, head / p.num_kv_heads, head % p.num_kv_heads,
                   {range * kRangeKeys, std::min((range + 1) * kRangeKeys, p.kv_len)}, partial(head, range), scratch);
  });
  for_each_unit(t.kv_heads, static_cast<double>(t.kv_heads * ranges * t.rows * p.v_head_dim), 0,
                [&](int64_t head, void*) {
                  kernels.merge(p, head / p.num_kv_heads, head % p.num_kv_heads, partial(head, 0), ranges);
                });
}

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
  const Tiling t = tile_rows(p);
  if (t.rows <= kDecodeRows)
    run_ranges(p, t);
  else
    run_prefill(p, t);
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
  const auto& kernels = kernels_in_use();
  const Tiling t = tile_rows(p);
  const int64_t step = backward_block(p.head_dim, p.v_head_dim), blocks = (p.kv_len + step - 1) / step;
  if (t.kv_heads * blocks == 0) grad_query.zero_();
  const Tensor sums =
      at::empty({p.batch * p.num_heads * p.q_len, sums_width(p.head_dim)}, query.options().dtype(accumulation));
  const Tensor done = at::zeros({t.kv_heads * t.tiles}, at::kInt);
  bp.grad_query_sums = sums.mutable_data_ptr();
  bp.blocks_done = done.mutable_data_ptr<int32_t>();
  bp.tiles = t.tiles;
  // Blocks outside, heads inside: neighbours in time seldom wait for each other, and under causality the longest come
  // first.
  for_each_unit(blocks * t.kv_heads, 4 * t.work, kernels.backward_scratch(p), [&](int64_t unit, void* scratch) {
    const int64_t head = unit % t.kv_heads, begin = unit / t.kv_heads * step;
    kernels.backward(bp, head / p.num_kv_heads, head % p.num_kv_heads, {begin, std::min(begin + step, p.kv_len)},
                     scratch);
  });
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
