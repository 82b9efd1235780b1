#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/swiglu.h>

namespace attnpack {
namespace {

using at::Tensor;

// With gradients it is torch's silu and product, and their derivatives.
Tensor swiglu_autograd(const Tensor& gate, const Tensor& up) {
  if (wants_formula({&gate, &up}) || torch::autograd::compute_requires_grad(gate, up)) return swiglu_formula(gate, up);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return swiglu(gate, up);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) { m.impl("swiglu", attnpack::swiglu_autograd); }
