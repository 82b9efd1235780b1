#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/detail/stored_layout.h>
#include <attnpack/ops/linear.h>
#include <attnpack/ops/stored_linear.h>

namespace attnpack {
namespace {

using at::Tensor;

Tensor stored_linear_meta(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                          std::optional<bool>) {
  check_stored_linear(input, weight, bias);
  auto shape = input.sym_sizes().vec();
  shape.back() = weight.sym_size(0);
  return at::empty_symint(shape, input.options());
}

Tensor one_stored_meta(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  return stored_linear_meta(input, weight, bias, {});
}

std::vector<Tensor> stored_linears_meta(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  return each_linear(one_stored_meta, input, weights, biases);
}

Tensor widen_stored_meta(const Tensor& blocks, at::ScalarType dtype) {
  const auto& layout = widened_layout(blocks, dtype);
  return at::empty_symint({blocks.sym_size(0), blocks.sym_size(1) * layout.numbers}, blocks.options().dtype(dtype));
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("stored_linear", attnpack::stored_linear_meta);
  m.impl("stored_linears", attnpack::stored_linears_meta);
  m.impl("widen_stored", attnpack::widen_stored_meta);
}
