#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/ops.h>
#include <attnpack/ops/cuda/run_attention.h>
#include <attnpack/ops/detail/attention_quantized.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/quantize.h>

namespace attnpack {
namespace {

// Makes rows of rows. from, to: contiguous; dtype: of the numbers.
void run_quantize(const CudaKernels& kernels, RowsTo which, const Tensor& from, const Tensor& to, int64_t dim,
                  int64_t bits, at::ScalarType dtype) {
  if (from.numel() == 0) return;
  const Target target(from);
  const QuantizeParams p{dim, bits, kernel_dtype(dtype), from.const_data_ptr(), to.mutable_data_ptr()};
  check_launch(kernels.quantize(p, which, from.numel() / from.size(-1), target.device(), target.stream()));
}

const CudaKernels* kernels_for(const Tensor& x, int64_t dim) {
  return dim <= kMostQuantizedDim ? cuda_kernels(x.device().index()) : nullptr;
}

}  // namespace

Tensor quantize_rows_cuda(const Tensor& x, int64_t bits) {
  check_quantize_rows(x, bits);
  const int64_t dim = x.size(-1);
  const CudaKernels* kernels = kernels_for(x, dim);
  if (!kernels) return quantize_rows_formula(x, bits);
  auto shape = x.sizes().vec();
  shape.back() = quantized_row_bytes(bits, dim);
  const Tensor rows = at::empty(shape, x.options().dtype(at::kByte));
  run_quantize(*kernels, RowsTo::kBytes, x.contiguous(), rows, dim, bits, x.scalar_type());
  return rows;
}

Tensor dequantize_rows_cuda(const Tensor& rows, int64_t bits, c10::SymInt sym_dim, at::ScalarType dtype) {
  check_dequantize_rows(rows, bits, sym_dim, dtype);
  const int64_t dim = sym_dim.expect_int();
  const CudaKernels* kernels = kernels_for(rows, dim);
  if (!kernels) return dequantize_rows_formula(rows, bits, sym_dim, dtype);
  auto shape = rows.sizes().vec();
  shape.back() = dim;
  const Tensor x = at::empty(shape, rows.options().dtype(dtype));
  run_quantize(*kernels, RowsTo::kNumbers, rows.contiguous(), x, dim, bits, dtype);
  return x;
}

AttentionResult attention_quantized_cuda(const Tensor& query, const Tensor& key, const Tensor& value, int64_t bits,
                                         c10::SymInt sym_v_head_dim, const AttentionArguments& args) {
  check_attention_quantized(query, key, value, bits, sym_v_head_dim, args);
  const int64_t v_head_dim = sym_v_head_dim.expect_int();
  const CudaKernels* kernels = kernels_for(query, std::max(query.size(3), v_head_dim));
  const auto expanded = [&] { return attention_quantized_formula(query, key, value, bits, sym_v_head_dim, args); };
  if (!kernels || args.key_index || !countable(query, key.size(2))) return expanded();
  // Products and sums of rotated rows are those of the rows themselves, rotated: (qH)(kH)^T = qk^T, p(vH)H = pv.
  const bool rotates = bits == 4;
  const auto rotated = [&](const Tensor& x) {
    const Tensor from = x.contiguous(), to = at::empty_like(from);
    run_quantize(*kernels, RowsTo::kRotated, from, to, x.size(-1), bits, x.scalar_type());
    return to;
  };
  const Tensor keys = unit_last_stride(key), values = unit_last_stride(value);
  const auto prepare = [&](const Tensor& rows) {
    CudaAttention call =
        prepare_cuda_attention(rows, stand_in(key, rows, query.size(3)), stand_in(value, rows, v_head_dim), args);
    AttentionParams& p = call.prepared.params;
    p.key = keys.const_data_ptr();
    p.value = values.const_data_ptr();
    p.key_strides = kernel_strides(keys);
    p.value_strides = kernel_strides(values);
    p.quantized_bits = bits;
    cuda::drop_unused_strides(p);
    return call;
  };
  CudaAttention call = prepare(query);
  if (!kernels->reads_source(call.prepared.params, call.most_group, query.device().index())) return expanded();
  if (!rotates) return run_cuda_forward(*kernels, call, query);
  const Tensor rows = rotated(query);
  call = prepare(rows);
  const auto [out, lse] = run_cuda_forward(*kernels, call, rows);
  return {rotated(out), lse};
}

}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("quantize_rows", attnpack::quantize_rows_cuda);
  m.impl("dequantize_rows", attnpack::dequantize_rows_cuda);
  m.impl("attention_quantized", attnpack::from_schema<attnpack::attention_quantized_cuda>);
}
