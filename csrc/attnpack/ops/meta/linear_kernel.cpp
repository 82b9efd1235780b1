#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/linear.h>

namespace attnpack {
namespace {

using at::Tensor;

Tensor linear_meta(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  // torch's linear accepts a weight on another device here, and returns memory that nobody has written.
  ATTNPACK_CHECK(weight.device() == input.device() && (!bias || bias->device() == input.device()), "input is on ",
                 input.device(), ", weight on ", weight.device(), ", bias on ", bias ? bias->device() : weight.device(),
                 ": move them to one device");
  return at::linear(input, weight, bias);
}

std::vector<Tensor> linears_meta(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  return each_linear(linear_meta, input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("linear", attnpack::linear_meta);
  m.impl("linears", attnpack::linears_meta);
}
