#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <vector>

namespace attnpack {

void check_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
// The plain differentiable formula, of ATen ops only.
at::Tensor rope_formula(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool interleaved);

// x as [B, H, L, D]: its leading dimensions become exactly two. The result is a view if x has up to four dimensions.
at::Tensor four_dimensions(at::Tensor x);

void check_rope_positions(const at::Tensor& positions);
// The checks of rope_table_by_length, and the shape of its tables.
void check_rope_by_length(const at::Tensor& positions, const std::optional<at::Tensor>& lengths,
                          at::ArrayRef<double> inv_freq, at::ArrayRef<double> long_inv_freq, int64_t trained_len);
std::vector<c10::SymInt> rope_table_shape(const at::Tensor& positions, const std::optional<at::Tensor>& lengths,
                                          at::ArrayRef<double> inv_freq);

}  // namespace attnpack
