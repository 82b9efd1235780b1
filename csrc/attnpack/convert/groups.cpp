#include <attnpack/convert/groups.h>

#include <attnpack/core/check.h>

namespace attnpack::convert {

Groups consecutive_groups(int64_t num_heads, int64_t num_kv_heads) {
  Groups groups(num_kv_heads);
  for (int64_t head = 0; head < num_heads; ++head) groups[head * num_kv_heads / num_heads].push_back(head);
  return groups;
}

void check_merge(int64_t num_heads, int64_t num_kv_heads) {
  ATTNPACK_CHECK(num_heads >= 1, "num_heads: got ", num_heads, ", want at least 1");
  ATTNPACK_CHECK(num_kv_heads >= 1 && num_kv_heads <= num_heads, "num_kv_heads: got ", num_kv_heads, ", want 1 to the ",
                 num_heads, " heads there are: conversion merges heads, it makes no new ones");
}

Groups resolve_groups(int64_t num_heads, int64_t num_kv_heads, const std::optional<Groups>& groups) {
  check_merge(num_heads, num_kv_heads);
  if (!groups) {
    ATTNPACK_CHECK(num_heads % num_kv_heads == 0, "num_kv_heads: got ", num_kv_heads, ", which does not divide the ",
                   num_heads, " heads there are; choose a divisor, or give groups that list the heads of each group");
    return consecutive_groups(num_heads, num_kv_heads);
  }
  ATTNPACK_CHECK(static_cast<int64_t>(groups->size()) == num_kv_heads, "groups: got ", groups->size(),
                 " lists, want num_kv_heads = ", num_kv_heads, " of them, the heads of each group");
  std::vector<bool> seen(num_heads, false);
  for (size_t g = 0; g < groups->size(); ++g) {
    ATTNPACK_CHECK(!(*groups)[g].empty(), "groups: got no heads in groups[", g, "], want at least one in each");
    for (const auto head : (*groups)[g]) {
      ATTNPACK_CHECK(head >= 0 && head < num_heads, "groups: got head ", head, " in groups[", g, "], want 0 to ",
                     num_heads - 1);
      ATTNPACK_CHECK(!seen[head], "groups: got head ", head, " twice, want each of the ", num_heads, " heads once");
      seen[head] = true;
    }
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    ATTNPACK_CHECK(seen[head], "groups: got head ", head, " in none of them, want each of the ", num_heads,
                   " heads once");
  }
  return *groups;
}

std::vector<int64_t> group_of_heads(const Groups& groups) {
  size_t count = 0;
  for (const auto& group : groups) count += group.size();
  std::vector<int64_t> map(count);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const auto head : groups[g]) map[head] = static_cast<int64_t>(g);
  }
  return map;
}

std::vector<int64_t> kv_head_of_queries(int64_t num_heads, int64_t num_kv_heads,
                                        const std::optional<std::vector<int64_t>>& head_map) {
  if (head_map) {
    ATTNPACK_CHECK(static_cast<int64_t>(head_map->size()) == num_heads, "head_map: got ", head_map->size(),
                   " entries, want num_heads = ", num_heads);
    for (const auto head : *head_map) {
      ATTNPACK_CHECK(head >= 0 && head < num_kv_heads, "head_map: got kv head ", head, ", want 0 to ",
                     num_kv_heads - 1);
    }
    return *head_map;
  }
  ATTNPACK_CHECK(num_kv_heads >= 1 && num_heads % num_kv_heads == 0, "num_kv_heads: got ", num_kv_heads,
                 ", which does not divide num_heads ", num_heads, "; give head_map");
  std::vector<int64_t> map(num_heads);
  for (int64_t head = 0; head < num_heads; ++head) map[head] = head / (num_heads / num_kv_heads);
  return map;
}

}  // namespace attnpack::convert
