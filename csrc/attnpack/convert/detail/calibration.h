#pragma once

#include <attnpack/convert/merge_heads.h>

namespace attnpack::convert {

// Fills in the defaults: context is x, and value_context is context. Raises unless each is [N, width].
Calibration resolve_calibration(const Calibration& calibration);

// [rows, E], or [rows, E + 1] with the bias as its last column; fp64.
at::Tensor with_bias(const at::Tensor& weight, const at::Tensor& bias);

// E[x x^T] over the rows of inputs [N, width] (with a last element 1 if bias), slightly regularised so that it has an
// inverse. If inputs are undefined it is the identity. [width, width] as with_bias gives it, fp64, on like's device.
at::Tensor second_moment(const at::Tensor& inputs, int64_t width, bool bias, const at::Tensor& like);

// E[y y^H] of y = rows x, rows [..., d, E] real or complex: [..., d, d].
at::Tensor output_moment(const at::Tensor& rows, const at::Tensor& moment);

}  // namespace attnpack::convert
