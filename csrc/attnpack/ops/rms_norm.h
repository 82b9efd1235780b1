#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace attnpack {

// x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019), computed in fp32 (fp64 for fp64) and
// rounded once. Without gradients it takes one pass over x. With gradients it is torch's rms_norm, which takes several.
at::Tensor rms_norm(const at::Tensor& x,       // [..., dim]
                    const at::Tensor& weight,  // [dim]
                    double eps);               // -> [..., dim]

// The same by torch's rms_norm, with its derivatives. Raises on arguments that do not fit.
at::Tensor rms_norm_formula(const at::Tensor& x, const at::Tensor& weight, double eps);

// A residual sum, and its norm: (x + added, rms_norm of it). The bits are those of the two operations.
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,       // [..., dim]
                                                const at::Tensor& added,   // as x
                                                const at::Tensor& weight,  // [dim]
                                                double eps);
std::tuple<at::Tensor, at::Tensor> add_rms_norm_formula(const at::Tensor& x, const at::Tensor& added,
                                                        const at::Tensor& weight, double eps);

}  // namespace attnpack
