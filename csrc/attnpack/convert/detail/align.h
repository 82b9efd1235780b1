#pragma once

#include <attnpack/convert/merge_heads.h>

namespace attnpack::convert {

// What several heads share, and how each is had from it.
struct SharedRows {
  at::Tensor rows;   // [rank, E]
  at::Tensor maps;   // [n, d, rank], head i is about maps[i] rows
  at::Tensor basis;  // [n d, rank], orthonormal
};

// The rows and maps that minimise sum_i E |metric_i^(1/2) (heads_i - maps_i rows) x|^2 for inputs x of second moment
// moment: the leading principal components of all heads together (Eckart and Young 1936). Real or complex.
SharedRows leading_rows(const at::Tensor& heads,   // [n, d, E]
                        const at::Tensor& metric,  // [n, d, d], Hermitian, not negative; its scale is of no effect
                        const at::Tensor& moment,  // [E, E], real
                        int64_t rank);

// The same with rank d. Of the equal solutions the one whose maps are, on the average, nearest to no turn and no scale.
SharedRows share_heads(const at::Tensor& heads, const at::Tensor& metric, const at::Tensor& moment);

// merge_kv_heads' "aligned": in each group the value heads become one and a matrix each, which goes into the readers'
// columns of o; the key heads one and, for each pair that RoPE turns, a rotation and scale each (a complex factor:
// what commutes with RoPE), for the other dims a matrix each, which go into the readers' rows of q. Errors count as
// much as queries and o make of them. (Alignment before merging: Jin et al. 2024, arXiv 2412.20677.)
AttentionWeights align_heads(const AttentionWeights& weights, const std::vector<int64_t>& head_map,
                             const Groups& groups, const MergeOptions& options);

}  // namespace attnpack::convert
