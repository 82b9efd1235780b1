#pragma once

#include <ATen/core/Tensor.h>

namespace attnpack {

// x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019), computed in fp32 (fp64 for fp64) and
// rounded once. Without gradients it takes one pass over x. With gradients it is torch's rms_norm, which takes several.
at::Tensor rms_norm(const at::Tensor& x,       // [..., dim]
                    const at::Tensor& weight,  // [dim]
                    double eps);               // -> [..., dim]

}  // namespace attnpack
