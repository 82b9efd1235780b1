#pragma once

#include <ATen/core/Tensor.h>

namespace attnpack {

// silu(gate) * up (Shazeer 2020), computed in fp32 (fp64 for fp64) and rounded once. Without gradients it takes one
// pass. With gradients it is torch's silu and its product.
at::Tensor swiglu(const at::Tensor& gate,  // [...]
                  const at::Tensor& up);   // the same shape -> [...]

// The same by torch's operators, with their derivatives. Raises on arguments that do not fit.
at::Tensor swiglu_formula(const at::Tensor& gate, const at::Tensor& up);

}  // namespace attnpack
