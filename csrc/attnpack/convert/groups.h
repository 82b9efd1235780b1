#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace attnpack::convert {

// The kv heads that become one, for each kv head of the result.
using Groups = std::vector<std::vector<int64_t>>;

// Returns the groups after a check: num_kv_heads lists that hold every one of num_heads heads once. Without groups it
// returns num_kv_heads runs of consecutive heads of equal length (Ainslie et al. 2023, section 2.1); num_kv_heads must
// then divide num_heads.
Groups resolve_groups(int64_t num_heads, int64_t num_kv_heads, const std::optional<Groups>& groups);

// Raises unless num_heads heads can become num_kv_heads.
void check_merge(int64_t num_heads, int64_t num_kv_heads);

// Runs of consecutive heads whose lengths differ by at most 1.
Groups consecutive_groups(int64_t num_heads, int64_t num_kv_heads);

// The group of each head.
std::vector<int64_t> group_of_heads(const Groups& groups);

// The kv head that each query head reads: head_map as given, else consecutive query heads share one.
std::vector<int64_t> kv_head_of_queries(int64_t num_heads, int64_t num_kv_heads,
                                        const std::optional<std::vector<int64_t>>& head_map);

}  // namespace attnpack::convert
