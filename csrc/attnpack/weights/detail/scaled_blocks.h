#pragma once

#include <ATen/core/Tensor.h>

#include <array>

// Weights in few bits, with one scale for each block, as fp32 numbers.
namespace attnpack {

// values [n, m] of FP8; scales [ceil(n / block[0]), ceil(m / block[1])], one for each block of so many rows and
// columns. Returns values * scale [n, m]. Raises a c10::ValueError for other shapes and dtypes.
at::Tensor from_fp8(const at::Tensor& values, const at::Tensor& scales, const std::array<int64_t, 2>& block);

// MXFP4 (OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1): blocks [..., G, 16] hold 32 E2M1 numbers each, two
// per byte, the first in the low half; scales [..., G] are exponents of two, biased by 127, where 255 is NaN. Returns
// [..., 32 * G]. Raises a c10::ValueError for other shapes and dtypes.
at::Tensor from_mxfp4(const at::Tensor& blocks, const at::Tensor& scales);

}  // namespace attnpack
