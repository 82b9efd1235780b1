#pragma once

#include <attnpack/convert/merge_heads.h>

namespace attnpack::convert {

// Mean squared distance between the activations of every two kv heads on the calibration, keys' and values' each
// relative to what a head's mean square is: [Hkv, Hkv], fp64, on the CPU.
at::Tensor head_distances(const AttentionWeights& weights, int64_t num_kv_heads, const Calibration& calibration);

// Groups of small distance: sum over groups of the squared deviations from the group's mean, which is the sum of its
// pairs' distances over its size. From consecutive groups, exchanging two heads (and, where sizes may be uneven,
// moving one) as long as that gets less. (Grouping by similarity: Chen et al. 2024, AsymGQA.)
Groups choose_groups(const at::Tensor& distances, int64_t num_kv_heads, bool uneven);

}  // namespace attnpack::convert
