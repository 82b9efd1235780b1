#pragma once

#include <cstdint>

#include <attnpack/core/params.h>

// How a bool mask is stored as bits, with the steps of keys that it leaves to each tile of rows (mask_bits.cuh). The
// forward kernels of sm90/ read these, because reading a mask's numbers takes them longer than the products.
namespace attnpack::cuda {

struct MaskPlan {
  // How many batches, heads and rows have bits of their own: 1 where all of them share the mask. The call stores no
  // bits if rows is 0.
  int64_t batches, heads, rows;
  int64_t words;          // per row, of 32 keys each: whole steps of 128 keys
  int64_t list_heads;     // kv heads that have lists of their own
  int64_t tiles;          // of a kv head's rows; each has a list
  int64_t keys_of_step;   // 128 or 64
  int64_t steps;          // of the keys
  int64_t begin;          // where the bits begin in the workspace
  int64_t bytes_of_bits;  // the lists follow
};

static inline MaskPlan plan_mask(const AttentionParams& p, int64_t tiles, int64_t keys_of_step, int64_t begin) {
  const Strides& s = p.mask_strides;
  MaskPlan m{s.batch ? p.batch : 1, s.head ? p.num_heads : 1, s.row ? p.q_len : 1};
  m.words = (p.kv_len + 127) / 128 * 4;
  m.list_heads = s.head || p.group_start ? p.num_kv_heads : 1;
  m.tiles = tiles;
  m.keys_of_step = keys_of_step;
  m.steps = (p.kv_len + keys_of_step - 1) / keys_of_step;
  m.begin = (begin + 15) / 16 * 16;  // kernels read 16 bytes at once
  m.bytes_of_bits = m.batches * m.heads * m.rows * m.words * 4;
  return m;
}
// The numbers of a list: how many of its steps come before each step, and those steps.
ATTNPACK_HD inline int64_t numbers_of_list(const MaskPlan& m) { return 2 * m.steps + 1; }
ATTNPACK_HD inline int64_t mask_lists(const MaskPlan& m) { return m.batches * m.list_heads * m.tiles; }
// The end of the lists in the workspace.
static inline int64_t mask_end(const MaskPlan& m) {
  return m.begin + (m.bytes_of_bits + mask_lists(m) * numbers_of_list(m) * 4 + 15) / 16 * 16;
}

}  // namespace attnpack::cuda
