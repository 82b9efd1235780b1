#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace attnpack {

using at::Tensor;

// The gradients of a formula in ATen ops, for each of its inputs; zeros where nothing depends on one. formula(inputs)
// gives a pair of tensors, the second of which may have no gradient upstream. With gradients enabled the result hangs
// on the graph of the inputs, and can be differentiated once more.
template <class Formula>
std::vector<Tensor> gradients_of_formula(const Formula& formula, const std::vector<Tensor>& inputs,
                                         const Tensor& grad_out, const std::optional<Tensor>& grad_state) {
  // A kernel below autograd calls this too, so autograd is let in again.
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode enable(true);
  auto keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard with_autograd(
      keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  // Views, because one input may be a function of another, or the same tensor.
  torch::autograd::variable_list sources;
  for (const Tensor& x : inputs)
    sources.push_back(create_graph && x.requires_grad() ? x.view_as(x) : x.detach().set_requires_grad(true));
  const auto [out, state] = formula(sources);
  torch::autograd::variable_list outputs{out}, upstream{grad_out.to(out.scalar_type())};
  if (grad_state) outputs.push_back(state), upstream.push_back(grad_state->to(state.scalar_type()));
  std::vector<Tensor> found = torch::autograd::grad(outputs, sources, upstream, /*retain_graph=*/create_graph,
                                                    create_graph, /*allow_unused=*/true);
  for (size_t i = 0; i < found.size(); ++i)
    if (!found[i].defined()) found[i] = at::zeros_like(inputs[i]);
  return found;
}

}  // namespace attnpack
