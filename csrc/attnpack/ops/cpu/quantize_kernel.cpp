#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/quantized.h>
#include <attnpack/ops/cpu/isa.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/quantize.h>
#include <attnpack/threads/threads.h>

namespace attnpack {
namespace {

using at::Tensor;

constexpr int64_t kQuantizedRowsOfUnit = 64;

// Runs a kernel over all rows of contiguous tensors. `to` has the shape of `from`, but for the last size.
void run_rows(decltype(Kernels::quantize_rows) kernel, QuantizeParams p, const Tensor& from, const Tensor& to) {
  p.from = from.const_data_ptr();
  p.to = to.mutable_data_ptr();
  const int64_t rows = from.numel() / from.size(-1);
  constexpr double kWork = 8;  // of a number, in multiply-adds
  for_each_unit((rows + kQuantizedRowsOfUnit - 1) / kQuantizedRowsOfUnit, kWork * static_cast<double>(rows * p.dim),
                static_cast<size_t>(p.dim) * sizeof(float), [&](int64_t unit, void* scratch) {
                  kernel(p, {unit * kQuantizedRowsOfUnit, std::min((unit + 1) * kQuantizedRowsOfUnit, rows)}, scratch);
                });
}

Tensor quantize_rows_cpu(const Tensor& x, int64_t bits) {
  check_quantize_rows(x, bits);
  auto sizes = x.sizes().vec();
  sizes.back() = quantized_row_bytes(bits, x.size(-1));
  const Tensor rows = at::empty(sizes, x.options().dtype(at::kByte));
  if (x.numel() > 0)
    run_rows(kernels_in_use().quantize_rows, {x.size(-1), bits, kernel_dtype(x.scalar_type())}, x.contiguous(), rows);
  return rows;
}

Tensor dequantize_rows_cpu(const Tensor& rows, int64_t bits, c10::SymInt sym_dim, at::ScalarType dtype) {
  check_dequantize_rows(rows, bits, sym_dim, dtype);
  auto sizes = rows.sizes().vec();
  sizes.back() = sym_dim.guard_int(__FILE__, __LINE__);
  const Tensor x = at::empty(sizes, rows.options().dtype(dtype));
  if (x.numel() > 0)
    run_rows(kernels_in_use().dequantize_rows, {sizes.back(), bits, kernel_dtype(dtype)}, rows.contiguous(), x);
  return x;
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) {
  m.impl("quantize_rows", attnpack::quantize_rows_cpu);
  m.impl("dequantize_rows", attnpack::dequantize_rows_cpu);
}
