#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace attnpack {

// input weight^T + bias, as torch's linear. Up to kFewRows rows of input without gradients, as in decoding, stream the
// weight at the speed of memory; everything else is torch's linear.
at::Tensor linear(const at::Tensor& input,                      // [..., in]
                  const at::Tensor& weight,                     // [out, in]
                  const std::optional<at::Tensor>& bias = {});  // [out] -> [..., out]

constexpr int64_t kFewRows = 16;

}  // namespace attnpack
