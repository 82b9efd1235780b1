#include <attnpack/distributed/detail/heads.h>

#include <algorithm>

namespace attnpack::distributed {

Share share_of(int64_t size, int64_t ranks, int64_t rank) {
  const auto first = rank * size / ranks;
  return {first, (rank + 1) * size / ranks - first};
}

ReadHeads kv_heads_of(const Share& share, int64_t num_heads, int64_t num_kv_heads,
                      const std::optional<std::vector<int64_t>>& head_map) {
  std::vector<int64_t> map;
  for (int64_t head = share.first; head < share.first + share.count; ++head)
    map.push_back(head_map ? (*head_map)[head] : head / (num_heads / num_kv_heads));
  auto read = map;
  std::sort(read.begin(), read.end());
  read.erase(std::unique(read.begin(), read.end()), read.end());
  for (auto& head : map) head = std::lower_bound(read.begin(), read.end(), head) - read.begin();
  bool even = !read.empty() && map.size() % read.size() == 0;
  for (size_t i = 0; even && i < map.size(); ++i) even = map[i] == static_cast<int64_t>(i / (map.size() / read.size()));
  return {read, even ? std::nullopt : std::optional(map)};
}

}  // namespace attnpack::distributed
