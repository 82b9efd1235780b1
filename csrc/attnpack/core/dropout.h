#pragma once

#include <cstdint>

#include <attnpack/core/params.h>

namespace attnpack {

// The last steps of splitmix64 (Steele et al. 2014).
ATTNPACK_HD static inline uint64_t mixed_bits(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// The seed of packed sequence b: a draw of its own for each. Sequence 0 keeps the seed.
ATTNPACK_HD static inline uint64_t sequence_seed(uint64_t seed, uint64_t b) {
  return b ? seed ^ mixed_bits(b * 0xd1b54a32d192ed03u) : seed;
}

// Whether dropout drops one probability: a hash of the seed and the element's place. Forward and backward draw the same
// mask, with any tiling and on every device.
ATTNPACK_HD static inline bool dropped(const AttentionParams& p, int64_t b, int64_t head, int64_t query, int64_t key) {
  const uint64_t x = mixed_bits(
      p.dropout_seed +
      0x9e3779b97f4a7c15u * (((static_cast<uint64_t>(b) * p.num_heads + head) * p.q_len + query) * p.kv_len + key + 1));
  return static_cast<double>(x >> 11) * 0x1p-53 < p.dropout_p;
}

}  // namespace attnpack
