#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <ATen/core/LegacyTypeDispatch.h>

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

// Whether the plain formula must run, for an input with a forward-mode gradient. Transforms of torch.func need nothing
// of their own: each level runs our nodes on its own tensors.
inline bool wants_formula(std::initializer_list<const at::Tensor*> inputs) {
  for (const at::Tensor* input : inputs)
    if (torch::autograd::isFwGradDefined(*input)) return true;
  return false;
}

}  // namespace attnpack
