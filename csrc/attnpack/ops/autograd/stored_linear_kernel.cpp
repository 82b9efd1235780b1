#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/stored_linear.h>

#include <algorithm>

namespace attnpack {
namespace {

using at::Tensor;

void refuse_stored_gradients(const Tensor& x) {
  TORCH_CHECK(!wants_formula({&x}) && !torch::autograd::compute_requires_grad(x),
              "attnpack: a layer of stored weights has no gradient, but its input or bias wants one. ",
              "Compute under torch.no_grad() (in C++ torch::NoGradGuard), or load the weights expanded to train them");
}

Tensor stored_linear_autograd(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                              std::optional<bool> round_input) {
  refuse_stored_gradients(input);
  if (bias) refuse_stored_gradients(*bias);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return stored_linear(input, weight, bias, round_input);
}

std::vector<Tensor> stored_linears_autograd(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  refuse_stored_gradients(input);
  std::for_each(biases.begin(), biases.end(), refuse_stored_gradients);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return stored_linears(input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("stored_linear", attnpack::stored_linear_autograd);
  m.impl("stored_linears", attnpack::stored_linears_autograd);
}
