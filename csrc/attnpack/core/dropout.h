#pragma once

#include <cstdint>

#include <attnpack/core/params.h>

namespace attnpack {

// Whether dropout drops one probability: a hash of the seed and the element's place (splitmix64, Steele et al. 2014).
// Forward and backward draw the same mask, with any tiling and on every device.
ATTNPACK_HD static inline bool dropped(const AttentionParams& p, int64_t b, int64_t head, int64_t query, int64_t key) {
  uint64_t x =
      p.dropout_seed +
      0x9e3779b97f4a7c15u * (((static_cast<uint64_t>(b) * p.num_heads + head) * p.q_len + query) * p.kv_len + key + 1);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1p-53 < p.dropout_p;
}

}  // namespace attnpack
