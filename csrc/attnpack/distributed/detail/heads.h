#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace attnpack::distributed {

// Consecutive heads, or hidden numbers.
struct Share {
  int64_t first, count;
};

// The part of `size` that a rank has: as equal in number as can be.
Share share_of(int64_t size, int64_t ranks, int64_t rank);

// The kv heads that some query heads read, in order, and the map from these query heads to them; none where it is the
// operator's default.
struct ReadHeads {
  std::vector<int64_t> heads;
  std::optional<std::vector<int64_t>> map;
};

// Those of the query heads in `share`; head_map as in the operator.
ReadHeads kv_heads_of(const Share& share, int64_t num_heads, int64_t num_kv_heads,
                      const std::optional<std::vector<int64_t>>& head_map);

}  // namespace attnpack::distributed
