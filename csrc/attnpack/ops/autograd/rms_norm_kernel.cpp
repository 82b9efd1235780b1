#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/rms_norm.h>

namespace attnpack {
namespace {

using at::Tensor;

// With gradients it is torch's rms_norm and its derivatives.
Tensor rms_norm_autograd(const Tensor& x, const Tensor& weight, double eps) {
  if (wants_formula({&x, &weight}) || torch::autograd::compute_requires_grad(x, weight))
    return rms_norm_formula(x, weight, eps);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return attnpack::rms_norm(x, weight, eps);
}

std::tuple<Tensor, Tensor> add_rms_norm_autograd(const Tensor& x, const Tensor& added, const Tensor& weight,
                                                 double eps) {
  if (wants_formula({&x, &added, &weight}) || torch::autograd::compute_requires_grad(x, added, weight))
    return add_rms_norm_formula(x, added, weight, eps);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return add_rms_norm(x, added, weight, eps);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("rms_norm", attnpack::rms_norm_autograd);
  m.impl("add_rms_norm", attnpack::add_rms_norm_autograd);
}
