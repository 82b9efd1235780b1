#pragma once

#include <ATen/core/Tensor.h>

namespace attnpack {

void check_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
// The plain differentiable formula, by ATen alone.
at::Tensor rope_formula(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool interleaved);

}  // namespace attnpack
