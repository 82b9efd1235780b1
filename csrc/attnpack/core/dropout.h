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

// Sets what kernels read of dropout: a probability is dropped where 53 bits of a hash are below dropout_below, and
// multiplied with kept_factor where it is kept.
static inline void set_dropout(AttentionParams& p, double probability, uint64_t seed) {
  p.dropout_p = probability;
  p.kept_factor = 1 / (1 - probability);
  const double below = probability * 0x1p53;
  p.dropout_below = static_cast<uint64_t>(below);
  if (static_cast<double>(p.dropout_below) < below) ++p.dropout_below;  // the next integer: the comparison is exact
  p.dropout_seed = seed;
}

// Whether dropout drops one probability: a hash of the seed and the element's place. Forward and backward draw the same
// mask, with any tiling and on every device. The place of a key is that of key 0 of its row, plus the key.
ATTNPACK_HD static inline uint64_t first_place(const AttentionParams& p, int64_t b, int64_t head, int64_t query) {
  return first_score(p, b, head, query) + 1;
}
ATTNPACK_HD static inline uint64_t seed_of(const AttentionParams& p) {
  return p.dropout_seed_at ? static_cast<uint64_t>(*p.dropout_seed_at) : p.dropout_seed;
}
ATTNPACK_HD static inline bool dropped_at(const AttentionParams& p, uint64_t seed, uint64_t place) {
  return (mixed_bits(seed + 0x9e3779b97f4a7c15u * place) >> 11) < p.dropout_below;
}
ATTNPACK_HD static inline bool dropped(const AttentionParams& p, int64_t b, int64_t head, int64_t query, int64_t key) {
  return dropped_at(p, seed_of(p), first_place(p, b, head, query) + key);
}

}  // namespace attnpack
