#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/quantized.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/cpu/loop_threads.h>
#include <attnpack/ops/cpu/work_units.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/attention_quantized.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

// Rotates the rows of x, contiguous floats, as rows of 4 bits are rotated.
void rotate_rows_(const Tensor& x) {
  if (x.numel() == 0) return;
  QuantizeParams p{};
  p.dim = x.size(-1);
  p.to = x.mutable_data_ptr();
  kernels_in_use().rotate_rows(p, {0, x.numel() / p.dim});
}

// The kernel streams quantised rows for few rows of queries. For more rows it would widen them again and again.
bool fits_kernel(const Tensor& query, const AttentionParams& p) {
  return query.scalar_type() != at::kDouble && tile_rows(p).rows <= kShortRows;
}

AttentionResult attention_quantized_cpu(const Tensor& query, const Tensor& key, const Tensor& value, int64_t bits,
                                        c10::SymInt v_head_dim, const AttentionArguments& args) {
  check_attention_quantized(query, key, value, bits, v_head_dim, args);
  if (args.key_index) return attention_quantized_formula(query, key, value, bits, v_head_dim, args);
  // Products and sums of rotated rows are those of the rows themselves, rotated: (qH)(kH)^T = qk^T, p(vH)H = pv.
  const bool rotated = bits == 4;
  const Tensor rows = rotated ? query.to(at::kFloat).contiguous().clone() : query;
  if (rotated) rotate_rows_(rows);
  PreparedAttention prepared =
      prepare_attention(rows, stand_in(key, rows, query.size(3)), stand_in(value, rows, v_head_dim), args);
  AttentionParams& p = prepared.params;
  if (!fits_kernel(query, p)) return attention_quantized_formula(query, key, value, bits, v_head_dim, args);
  prepared.key = unit_last_stride(key);
  prepared.value = unit_last_stride(value);
  p.key = prepared.key.const_data_ptr();
  p.value = prepared.value.const_data_ptr();
  p.key_strides = kernel_strides(prepared.key);
  p.value_strides = kernel_strides(prepared.value);
  p.quantized_bits = bits;
  auto [out, lse] = make_outputs(prepared, rows);
  p.dtype = kernel_dtype(query.scalar_type());  // rotated rows are floats, and need be no more exact than the query
  run_forward(kernels_in_use(), {&p, 1}, kLoopThreads);
  if (!rotated) return {out, lse};
  rotate_rows_(out);
  return {empty_laid_as(query, out.sym_sizes(), query.options()).copy_(out), lse};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("attention_quantized", attnpack::from_schema<attnpack::attention_quantized_cpu>);
}
