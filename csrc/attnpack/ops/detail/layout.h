#pragma once

#include <ATen/ATen.h>

#include <attnpack/ops/detail/unknown_sizes.h>

namespace attnpack {

// An empty [batch, heads, length, width] tensor in the layout of `like`: contiguous if `like` is, and else stored
// [batch, length, heads, width], so that joining the heads is a view. All results have this layout. Kernels and Meta
// must agree on it (Inductor asserts strides).
// Sizes: an array of int64_t or SymInt. empty(sizes) makes a contiguous tensor.
template <class Sizes, class Empty>
at::Tensor make_laid_as(const at::Tensor& like, Sizes shape, const Empty& empty) {
  if (like.is_contiguous_or_false()) return empty(shape);
  return empty({shape[0], shape[2], shape[1], shape[3]}).transpose(1, 2);
}
inline at::Tensor empty_laid_as(const at::Tensor& like, c10::SymIntArrayRef shape, const at::TensorOptions& options) {
  return make_laid_as(like, shape, [&](c10::SymIntArrayRef sizes) { return at::empty_symint(sizes, options); });
}
inline at::Tensor empty_laid_as(const at::Tensor& like) {
  return empty_laid_as(like, like.sym_sizes(), like.options());
}

// x itself, or a copy in the layout of `like`.
inline at::Tensor laid_as(const at::Tensor& like, const at::Tensor& x) {
  return like.is_contiguous_or_false() ? x.contiguous() : x.transpose(1, 2).contiguous().transpose(1, 2);
}

inline at::ScalarType accumulation_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}
inline at::ScalarType accumulation_type(const at::Tensor& x) { return accumulation_type(x.scalar_type()); }

inline bool is_int32_or_int64(const at::Tensor& t) {
  return t.scalar_type() == at::kInt || t.scalar_type() == at::kLong;
}

// 0 .. n - 1, on the device of `like`.
inline at::Tensor count_from_zero(const c10::SymInt& n, const at::Tensor& like) {
  return at::arange(n, at::TensorOptions(at::kLong).device(like.device()));
}

}  // namespace attnpack
