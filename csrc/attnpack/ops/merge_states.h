#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace attnpack {

// Joins two results over disjoint sets of keys: lse = log(exp a + exp b), out = sum of out * exp(lse_part - lse).
std::tuple<at::Tensor, at::Tensor> merge_states(const at::Tensor& out_a,   // [B, H, L, Dv]
                                                const at::Tensor& lse_a,   // [B, H, L]
                                                const at::Tensor& out_b,   // [B, H, L, Dv]
                                                const at::Tensor& lse_b);  // [B, H, L]

}  // namespace attnpack
