#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/linear.h>

namespace attnpack {
namespace {

using at::Tensor;

// With gradients it is torch's linear and its derivatives.
Tensor linear_autograd(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Tensor none;
  if (wants_formula({&input, &weight, bias ? &*bias : &none}) ||
      torch::autograd::compute_requires_grad(input, weight, bias))
    return at::linear(input, weight, bias);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return attnpack::linear(input, weight, bias);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) { m.impl("linear", attnpack::linear_autograd); }
