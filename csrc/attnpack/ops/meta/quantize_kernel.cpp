#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/quantize.h>

namespace attnpack {
namespace {

using at::Tensor;

Tensor like_rows(const Tensor& x, const c10::SymInt& last, at::ScalarType dtype) {
  auto sizes = x.sym_sizes().vec();
  sizes.back() = last;
  return at::empty_symint(sizes, x.options().dtype(dtype));
}

Tensor quantize_rows_meta(const Tensor& x, int64_t bits) {
  check_quantize_rows(x, bits);
  return like_rows(x, sym_quantized_row_bytes(bits, x.sym_size(-1)), at::kByte);
}

Tensor dequantize_rows_meta(const Tensor& rows, int64_t bits, c10::SymInt dim, at::ScalarType dtype) {
  check_dequantize_rows(rows, bits, dim, dtype);
  return like_rows(rows, dim, dtype);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("quantize_rows", attnpack::quantize_rows_meta);
  m.impl("dequantize_rows", attnpack::dequantize_rows_meta);
}
