#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <type_traits>

// Autograd nodes are written by hand, because a call of a torch::autograd::Function takes much longer (PERFORMANCE.md).
namespace attnpack {

// torch >= 2.13 keeps nodes in c10::intrusive_ptr, older ones in std::shared_ptr.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class N, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<N>(std::forward<Args>(args)...);
  else
    return c10::make_intrusive<N>(std::forward<Args>(args)...);
}

// Whether the plain formula must run: under a torch.func transform, which cannot see our node, or for an input with a
// forward-mode gradient.
inline bool wants_formula(std::initializer_list<const at::Tensor*> inputs) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return true;
  for (const at::Tensor* input : inputs)
    if (torch::autograd::isFwGradDefined(*input)) return true;
  return false;
}

// Makes outputs of a backward op raise when they are differentiated once more.
template <class Inputs>
void forbid_double_backward(const char* op, const Inputs& inputs, std::initializer_list<at::Tensor> outputs) {
  auto node = make_node<torch::autograd::Error>(
      std::string("attnpack: ") + op +
          " has no double backward: use attnpack.reference, or torch.func transforms, which differentiate the formula",
      torch::autograd::collect_next_edges(inputs));
  for (const at::Tensor& output : outputs) torch::autograd::set_history(output, node);
}

}  // namespace attnpack
