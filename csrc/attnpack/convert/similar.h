#pragma once

#include <attnpack/convert/merge_heads.h>

namespace attnpack::convert {

// Mean squared distance between the activations of every two kv heads on the calibration: [Hkv, Hkv], fp64, on the CPU.
// The distances of keys and of values are each relative to the mean square of a head.
at::Tensor head_distances(const AttentionWeights& weights, int64_t num_kv_heads, const Calibration& calibration);

// Groups of heads at small distances. The cost is the sum over groups of the squared deviations from the group's mean,
// which is the sum of the group's pair distances over its size. The search begins with consecutive groups, and
// exchanges two heads (or, where sizes may be uneven, moves one) as long as that lowers the cost. (Grouping by
// similarity: Chen et al. 2024, AsymGQA.)
Groups choose_groups(const at::Tensor& distances, int64_t num_kv_heads, bool uneven);

}  // namespace attnpack::convert
