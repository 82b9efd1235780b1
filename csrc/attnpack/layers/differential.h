#pragma once

#include <ATen/core/Tensor.h>

namespace attnpack {

// The parameters of the first form of differential attention, each [head_dim].
struct DifferentialLambdas {
  at::Tensor q1, k1, q2, k2;
};

// Differential attention (Ye et al. 2024, arXiv 2410.05258, section 2.1) as one call of attend: query heads h and
// h + num_heads / 2 attend with keys of their own, and read values of twice the width.

// Values as those heads read them: kv heads j and j + Hkv / 2 side by side, once for each half of the kv heads.
at::Tensor pair_values(const at::Tensor& value);  // [B, Hkv, L, D] -> [B, Hkv, L, 2 * D]

// (1 - lambda_init) * norm(out_h - lambda * out_(h + num_heads / 2)), where lambda is
// exp(q1 k1) - exp(q2 k2) + lambda_init, and norm an RMSNorm without weights over a head.
at::Tensor subtract_halves(const at::Tensor& joined,  // [B, L, num_heads * W]
                           int64_t num_heads, const DifferentialLambdas& lambdas, double lambda_init,
                           double eps);  // -> [B, L, num_heads / 2 * W]

// The second form (Ye et al. 2026, Differential Transformer V2): out_(2 h) - sigmoid(lambda_h) * out_(2 h + 1).
at::Tensor subtract_pairs(const at::Tensor& joined,    // [B, L, 2 * H * D]
                          const at::Tensor& lambdas);  // [B, L, H] -> [B, L, H * D]

}  // namespace attnpack
