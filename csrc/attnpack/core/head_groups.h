#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace attnpack {

// Query heads sorted by the kv head that they read. Groups may be uneven or empty: group g holds heads[start[g]] ...
// heads[start[g + 1] - 1].
struct HeadGroups {
  std::vector<int64_t> start;  // [num_kv_heads + 1]
  std::vector<int64_t> heads;  // [num_heads]
};

inline HeadGroups group_heads(const std::vector<int64_t>& map, int64_t num_kv_heads) {
  HeadGroups groups{std::vector<int64_t>(num_kv_heads + 1, 0), std::vector<int64_t>(map.size())};
  for (int64_t kv_head : map) ++groups.start[kv_head + 1];
  for (int64_t g = 0; g < num_kv_heads; ++g) groups.start[g + 1] += groups.start[g];
  auto next = groups.start;
  for (std::size_t h = 0; h < map.size(); ++h) groups.heads[next[map[h]]++] = static_cast<int64_t>(h);
  return groups;
}

}  // namespace attnpack
