#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

// Lists of names: the numbers of blocks of keys that a row attends. No headers of torch.
namespace attnpack {

// Whether to sort by a bit for each block. With more blocks than this, reading the bits would take longer than sorting.
inline bool sorts_by_bits(int64_t count, int64_t blocks) { return blocks <= 64 * count; }

// How many bytes of scratch sort_names takes.
inline size_t sorting_scratch(int64_t count, int64_t blocks) {
  return sorts_by_bits(count, blocks) ? static_cast<size_t>(blocks + 63) / 64 * sizeof(uint64_t) : 0;
}

// Writes the names of a row to `list`, in rising order and each once, without those of -1. Returns how many there are,
// or -1 if one is out of range.
template <class Name>
int64_t sort_names(const Name* names, int64_t count, int64_t blocks, int32_t* list, void* scratch) {
  int64_t kept = 0;
  bool rises = true;
  for (int64_t i = 0; i < count; ++i) {
    const auto name = static_cast<int64_t>(names[i]);
    if (name == -1) continue;
    if (name < 0 || name >= blocks) return -1;
    rises &= kept == 0 || list[kept - 1] < name;
    list[kept++] = static_cast<int32_t>(name);
  }
  if (rises) return kept;
  if (!sorts_by_bits(count, blocks)) {
    std::sort(list, list + kept);
    return std::unique(list, list + kept) - list;
  }
  const int64_t words = (blocks + 63) / 64;
  auto* const bits = static_cast<uint64_t*>(scratch);
  std::memset(bits, 0, words * sizeof(uint64_t));
  for (int64_t i = 0; i < kept; ++i) bits[list[i] / 64] |= uint64_t{1} << list[i] % 64;
  kept = 0;
  for (int64_t w = 0; w < words; ++w)
    for (uint64_t left = bits[w]; left; left &= left - 1)
      list[kept++] = static_cast<int32_t>(64 * w + __builtin_ctzll(left));
  return kept;
}

}  // namespace attnpack
