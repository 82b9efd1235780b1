#pragma once

#include <ATen/ATen.h>

namespace attnpack {

// An empty [batch, heads, length, width] tensor stored [batch, length, heads, width]. All results have this layout, so
// that joining the heads is a view. Kernels and Meta must agree on it (Inductor asserts strides).
inline at::Tensor empty_heads_inside(c10::SymIntArrayRef shape, const at::TensorOptions& options) {
  return at::empty_symint({shape[0], shape[2], shape[1], shape[3]}, options).transpose(1, 2);
}

inline at::ScalarType accumulation_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace attnpack
