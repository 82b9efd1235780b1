#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <tuple>

namespace attnpack {

// Rotates the first r dims of x by the angles behind cos and sin, pairs (i, i + r/2), or (2i, 2i + 1) if interleaved;
// computed in fp32 (fp64 for fp64), returned in x's dtype. (Su et al. 2021, section 3.4.2.)
at::Tensor apply_rope(const at::Tensor& x,    // [..., L, D]
                      const at::Tensor& cos,  // broadcasts to [..., L, r/2]
                      const at::Tensor& sin,  // as cos
                      bool interleaved = false);

// cos and sin of position * inv_freq, times factor: angles in fp64, tables in fp32.
std::tuple<at::Tensor, at::Tensor> rope_table(const at::Tensor& positions,    // [...] int64
                                              at::ArrayRef<double> inv_freq,  // r/2 frequencies
                                              double factor = 1.0);           // -> two of [..., r/2]

}  // namespace attnpack
