#include <torch/library.h>

#include <attnpack/ops/quantize.h>

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("quantize_rows", attnpack::quantize_rows_formula);
  m.impl("dequantize_rows", [](const at::Tensor& rows, int64_t bits, c10::SymInt dim, at::ScalarType dtype) {
    return attnpack::dequantize_rows_formula(rows, bits, dim, dtype);
  });
}
