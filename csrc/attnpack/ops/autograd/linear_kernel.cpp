#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/linear.h>

#include <algorithm>

namespace attnpack {
namespace {

using at::Tensor;

// With gradients it is torch's linear and its derivatives.
Tensor linear_autograd(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Tensor none;
  if (wants_formula({&input, &weight, bias ? &*bias : &none}) ||
      torch::autograd::compute_requires_grad(input, weight, bias))
    return linear_formula(input, weight, bias);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return attnpack::linear(input, weight, bias);
}

bool without_derivatives(const Tensor& x) { return !wants_formula({&x}) && !torch::autograd::compute_requires_grad(x); }

std::vector<Tensor> linears_autograd(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  if (!without_derivatives(input) || !std::all_of(weights.begin(), weights.end(), without_derivatives) ||
      !std::all_of(biases.begin(), biases.end(), without_derivatives))
    return linears_formula(input, weights, biases);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return attnpack::linears(input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("linear", attnpack::linear_autograd);
  m.impl("linears", attnpack::linears_autograd);
}
