#pragma once

#include <cstdint>

#include <attnpack/core/params.h>

// How a bool mask is stored as bits, with the steps that it leaves to each tile of rows or of keys (mask_bits.cuh). The
// kernels of sm90/ read these, because reading a mask's numbers takes them longer than the products.
namespace attnpack::cuda {

struct MaskBits {
  // How many batches, heads and rows have bits of their own: 1 where all of them share the mask. The call stores no
  // bits if rows is 0.
  int64_t batches, heads, rows;
  int64_t words;  // per row, of 32 keys each: whole steps of 128 keys
  int64_t begin;  // in the workspace, in bytes
};
static inline int64_t to_sixteens(int64_t bytes) { return (bytes + 15) / 16 * 16; }  // kernels read 16 bytes at once
static inline MaskBits plan_mask_bits(const AttentionParams& p, int64_t begin) {
  const Strides& s = p.mask_strides;
  return {s.batch ? p.batch : 1, s.head ? p.num_heads : 1, s.row ? p.q_len : 1, (p.kv_len + 127) / 128 * 4,
          to_sixteens(begin)};
}
static inline int64_t end_of(const MaskBits& m) { return m.begin + m.batches * m.heads * m.rows * m.words * 4; }
// The most bytes of bits. Kernels count their rows and words in 32 bits, and a mask whose columns are all alike has
// fewer bytes than its bits.
constexpr int64_t kMostMaskBytes = int64_t{1} << 32;
static inline bool fits_mask_bits(const AttentionParams& p) { return end_of(plan_mask_bits(p, 0)) <= kMostMaskBytes; }

// Lists of steps, one for each tile. Tiles that share the mask share a list.
struct MaskLists {
  int64_t batches, kv_heads, tiles;
  int64_t step;     // how many keys or rows
  int64_t steps;    // the most of a list
  int64_t numbers;  // of a list
  int64_t begin;    // as of the bits
};
ATTNPACK_HD inline int64_t count_lists(const MaskLists& l) { return l.batches * l.kv_heads * l.tiles; }
static inline int64_t end_of(const MaskLists& l) { return l.begin + to_sixteens(count_lists(l) * l.numbers * 4); }
static inline int64_t kv_heads_with_lists(const AttentionParams& p) {
  return p.mask_strides.head || p.group_start ? p.num_kv_heads : 1;
}
// Steps of keys for tiles of rows: one list for all tiles where rows and heads share the mask. Before them the list
// counts, for each step of all, those that are listed before it.
static inline MaskLists plan_key_lists(const AttentionParams& p, int64_t tiles, int64_t step, int64_t begin) {
  const int64_t steps = (p.kv_len + step - 1) / step;
  const bool by_tile = p.mask_strides.row || p.mask_strides.head;
  return {p.mask_strides.batch ? p.batch : 1,
          kv_heads_with_lists(p),
          by_tile ? tiles : 1,
          step,
          steps,
          2 * steps + 1,
          begin};
}
// Steps of rows for tiles of keys, by the mask and by the rows' ranges. A step has rows of one query head. Before them
// the list has their count.
static inline MaskLists plan_row_lists(const AttentionParams& p, int64_t tiles, int64_t step, int64_t most_group,
                                       int64_t begin) {
  const int64_t steps = most_group * ((p.q_len + step - 1) / step);
  const bool by_batch = p.mask_strides.batch || p.kv_lens || p.q_offsets;
  return {by_batch ? p.batch : 1, kv_heads_with_lists(p), tiles, step, steps, steps + 1, begin};
}

}  // namespace attnpack::cuda
