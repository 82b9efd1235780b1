#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/linear.h>

namespace attnpack {
namespace {

at::Tensor linear_meta(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return at::linear(input, weight, bias);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("linear", attnpack::linear_meta);
  m.impl("linears", attnpack::linears_formula);
}
