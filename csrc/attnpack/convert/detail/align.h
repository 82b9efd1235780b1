#pragma once

#include <attnpack/convert/merge_heads.h>

namespace attnpack::convert {

// The rows that several heads share, and the map from these rows to each head.
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

// The same with rank d. Many solutions are equally good. This is the one whose maps are, on average, nearest to no
// rotation and no scale.
SharedRows share_heads(const at::Tensor& heads, const at::Tensor& metric, const at::Tensor& moment);

// merge_kv_heads' "aligned". The value heads of a group become one head and a matrix per old head; the matrix goes into
// the readers' columns of o. The key heads of a group become one head too. For each pair of dims that RoPE rotates, an
// old head gets a rotation and a scale (a complex factor, which commutes with RoPE); for the other dims it gets a
// matrix. Both go into the readers' rows of q. The queries weigh the errors of the keys that they read, and o weighs
// the errors of values. (Alignment before merging: Jin et al. 2024, arXiv 2412.20677.)
AttentionWeights align_heads(const AttentionWeights& weights, const std::vector<int64_t>& head_map,
                             const Groups& groups, const MergeOptions& options);

}  // namespace attnpack::convert
