#pragma once

#include <ATen/ops/dropout.h>
#include <torch/nn/module.h>

namespace attnpack {

// x after the module's dropout, which acts in training.
inline at::Tensor dropped(const at::Tensor& x, double dropout, const torch::nn::Module& module) {
  return dropout > 0 && module.is_training() ? at::dropout(x, dropout, /*train=*/true) : x;
}

}  // namespace attnpack
