#pragma once

#include <ATen/ATen.h>

namespace attnpack {

// Whether two tensors of fp32 agree.
inline bool close(const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, 1e-4, 1e-5); }

}  // namespace attnpack
