#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <tuple>

namespace attnpack {

// Rotates the first r dims of x by the angles that cos and sin belong to. Pairs are (i, i + r/2), or (2i, 2i + 1) if
// interleaved. Computed in fp32 (fp64 for fp64), returned in x's dtype. (Su et al. 2021, section 3.4.2.)
at::Tensor apply_rope(const at::Tensor& x,    // [..., L, D]
                      const at::Tensor& cos,  // broadcasts to [..., L, r/2]
                      const at::Tensor& sin,  // as cos
                      bool interleaved = false);

// cos and sin of position * inv_freq, times factor: angles in fp64, tables in fp32.
std::tuple<at::Tensor, at::Tensor> rope_table(const at::Tensor& positions,    // [...] int64
                                              at::ArrayRef<double> inv_freq,  // r/2 frequencies
                                              double factor = 1.0);           // -> two of [..., r/2]

// The same with frequencies that follow the length of each sequence. Up to trained_len they are inv_freq. Past it they
// are long_inv_freq, if there are any (LongRoPE), else those of a base b * g^(r / (r - 2)), where g = growth * length /
// trained_len - (growth - 1) and growth > 0 (dynamic NTK).
std::tuple<at::Tensor, at::Tensor> rope_table_by_length(
    const at::Tensor& positions,               // [L] or [B, L] int64
    const std::optional<at::Tensor>& lengths,  // [B] int32 or int64; default the highest position of a row + 1
    at::ArrayRef<double> inv_freq, double factor,
    at::ArrayRef<double> long_inv_freq,   // r/2 or none
    double growth, int64_t trained_len);  // -> two of [L, r/2], or [B, L, r/2] where either has B rows

}  // namespace attnpack
