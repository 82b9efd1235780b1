#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <attnpack/ops/linear.h>

namespace attnpack {
namespace {

// Under autocast it is torch's linear, which knows what to cast.
at::Tensor linear_autocast(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  check_linear_shapes(input, weight, bias);
  return at::linear(input, weight, bias);
}

std::vector<at::Tensor> linears_autocast(const at::Tensor& input, at::TensorList weights, at::TensorList biases) {
  return each_linear(linear_autocast, input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, AutocastCPU, m) {
  m.impl("linear", attnpack::linear_autocast);
  m.impl("linears", attnpack::linears_autocast);
}
TORCH_LIBRARY_IMPL(attnpack, AutocastCUDA, m) {
  m.impl("linear", attnpack::linear_autocast);
  m.impl("linears", attnpack::linears_autocast);
}
