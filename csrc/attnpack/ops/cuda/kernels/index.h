#pragma once

#include <cstdint>

#include <attnpack/core/params.h>

// The arithmetic on indices of the tensor-core kernels. It needs no CUDA: host tests check it against brute force.
namespace attnpack::cuda {

// Rows of 16-bit numbers in shared memory are cut into chunks of 16 bytes. Chunk c of row r lies at place c ^ (r mod 8)
// of its row. A load of a matrix reads the same chunk of eight rows. These eight chunks then lie in eight different
// groups of four banks, for any row width that is a multiple of 64 numbers.
ATTNPACK_HD constexpr int swizzle(int row, int chunk) { return chunk ^ (row & 7); }
ATTNPACK_HD constexpr int swizzled_offset(int row, int chunk, int width) {
  return row * width + swizzle(row, chunk) * 8;
}
// The offset of chunk `chunk + more` of a row, from that of `chunk`. `chunk` has no bit of `more`. This takes one
// instruction where the offset of each chunk would take a register.
ATTNPACK_HD constexpr int swizzled_further(int offset, int more) { return (offset ^ (more & 7) * 8) + more / 8 * 64; }

// Fragments of mma.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"). A: register i of a lane holds two
// neighbours in k of one row. B: it holds two neighbours in k of one column. C: it holds number i.
struct Place {
  int row, column;
};
ATTNPACK_HD constexpr Place place_in_a(int lane, int reg, int half) {
  return {lane / 4 + (reg & 1) * 8, lane % 4 * 2 + (reg >> 1) * 8 + half};
}
ATTNPACK_HD constexpr Place place_in_b(int lane, int reg, int half) {  // row: k, column: n
  return {lane % 4 * 2 + reg * 8 + half, lane / 4};
}
ATTNPACK_HD constexpr Place place_in_c(int lane, int i) { return {lane / 4 + (i >> 1) * 8, lane % 4 * 2 + (i & 1)}; }

// The row and the chunk that a lane names, so that the four matrices of one load are
// - an operand A of 16 rows, from chunk `chunk` on: registers a0 ... a3;
ATTNPACK_HD constexpr Place lane_for_a(int lane) { return {lane % 16, lane / 16}; }
// - b0, b1 of two neighbouring operands B whose columns are stored as rows (keys, for Q K^T);
ATTNPACK_HD constexpr Place lane_for_b(int lane) { return {lane % 8 + lane / 16 * 8, lane / 8 % 2}; }
// - b0, b1 of two neighbouring operands B stored as they are, loaded transposed (values, for P V).
ATTNPACK_HD constexpr Place lane_for_b_transposed(int lane) { return {lane % 16, lane / 16}; }

// The order of blocks. Where tiles differ in length (`sections`), the longest tiles of several heads come before the
// next ones of any, so that short blocks fill the gaps that long ones leave. These heads are a section: as many as the
// L2 cache holds the keys and values of. Without sections a head's tiles follow each other.
constexpr int64_t kSectionBytes = 32 << 20;
static inline int64_t heads_of_section(bool sections, int64_t heads, int64_t bytes_of_head) {
  if (!sections || heads < 1) return 1;
  const int64_t fitting = bytes_of_head > 0 ? kSectionBytes / bytes_of_head : heads;
  return fitting < 1 ? 1 : fitting < heads ? fitting : heads;
}
// A grid has fewer than 2^31 blocks, so 32 bits suffice. A division of 64 bits takes about 150 cycles, and every block
// would wait for several.
struct BlockPlace {
  int32_t head, tile;  // tile: in the order of the blocks
};
ATTNPACK_HD constexpr BlockPlace place_of_block(int64_t block, int64_t heads, int64_t tiles, int64_t section) {
  const uint32_t b = static_cast<uint32_t>(block), h = static_cast<uint32_t>(heads), t = static_cast<uint32_t>(tiles),
                 s = static_cast<uint32_t>(section);
  const uint32_t first = b / (s * t) * s, inside = b - first * t;
  const uint32_t here = h - first < s ? h - first : s;  // the last section may be smaller
  return {static_cast<int32_t>(first + inside % here), static_cast<int32_t>(inside / here)};
}
// Tiles of `size` rows, of packed sequences whose tokens have `members` rows each. Sequence b has the tiles from number
// ends[b] * members / size + b on. That is room for all of its tiles and at most one more, and nobody has to add up the
// tiles of the sequences before.
ATTNPACK_HD static inline int64_t count_packed_tiles(int64_t tokens, int64_t sequences, int64_t members, int64_t size) {
  return tokens * members / size + sequences;
}
struct PackedTile {
  int64_t sequence, tile;
};
ATTNPACK_HD inline PackedTile packed_tile(const int64_t* ends, int64_t tokens, int64_t sequences, int64_t members,
                                          int64_t size, int64_t number) {
  // Nobody has checked the ends. No tile has a number below 0, whatever they are.
  const auto rows_before = [&](int64_t b) { return b > 0 ? clamped(ends[b], 0, tokens) * members : 0; };
  int64_t found = 0;  // the last sequence whose first tile is not after this one
  for (int64_t end = sequences; end - found > 1;) {
    const int64_t middle = (found + end) / 2;
    const bool begun = rows_before(middle) < size * (number - middle + 1);
    begun ? found = middle : end = middle;
  }
  return {found, number - rows_before(found) / size - found};
}

struct HeadPlace {
  int32_t batch, kv_head;
};
ATTNPACK_HD constexpr HeadPlace place_of_head(int32_t head, int64_t num_kv_heads) {
  const int32_t heads = static_cast<int32_t>(num_kv_heads);
  return {head / heads, head % heads};
}

// Into how many parts the steps of a block are cut, by the call's shape and by how many blocks the device runs at once.
// One part where the blocks fill 80% of a wave. Else the smallest count with which the last block ends at most 5% later
// than with the best count. A block takes the time of its steps, and of `ends` more for its beginning and end.
constexpr int64_t kMostParts = 128;
static inline int64_t parts_of_steps(int64_t blocks, int64_t at_once, int64_t steps, int64_t fewest_steps,
                                     int64_t ends) {
  const int64_t most = steps / fewest_steps < kMostParts ? steps / fewest_steps : kMostParts;
  if (most <= 1 || blocks <= 0 || 5 * blocks >= 4 * at_once) return 1;
  const auto end = [&](int64_t parts) {
    const int64_t waves = (blocks * parts + at_once - 1) / at_once;
    return waves * ((steps + parts - 1) / parts + ends);
  };
  int64_t best = end(1);
  for (int64_t parts = 2; parts <= most; ++parts) best = end(parts) < best ? end(parts) : best;
  int64_t parts = 1;
  while (20 * end(parts) > 21 * best) ++parts;
  const int64_t each = (steps + parts - 1) / parts;
  return (steps + each - 1) / each;
}
// Forward: parts of the keys of a kv head, which begin at multiples of kSplitStep.
constexpr int64_t kSplitStep = 64;
static inline int64_t parts_of_keys(int64_t blocks, int64_t at_once, int64_t kv_len) {
  const int64_t steps = kv_len > kSplitStep ? (kv_len + kSplitStep - 1) / kSplitStep : 1;
  return parts_of_steps(blocks, at_once, steps, 2, 1);
}

}  // namespace attnpack::cuda
