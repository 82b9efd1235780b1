#pragma once

#include <attnpack/ops/cuda/kernels/device.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>

// A bool mask as bits: bit i of word w of a row says whether the row may see key 32 w + i. For each tile of rows there
// is a list of the steps of keys that it sees any key of, so that kernels pass over the others, as FlexAttention (Dong
// et al. 2024) does. Here the numbers of the mask tell.
namespace attnpack::cuda {

ATTNPACK_HD inline uint32_t* mask_bits(const MaskPlan& m, void* workspace) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(workspace) + m.begin);
}
// Where a row's words begin.
ATTNPACK_HD inline int64_t mask_place(const MaskPlan& m, int64_t b, int64_t head, int64_t query) {
  return (((m.batches > 1 ? b : 0) * m.heads + (m.heads > 1 ? head : 0)) * m.rows + (m.rows > 1 ? query : 0)) * m.words;
}
ATTNPACK_HD inline uint32_t* mask_row(const MaskPlan& m, void* workspace, int64_t b, int64_t head, int64_t query) {
  return mask_bits(m, workspace) + mask_place(m, b, head, query);
}
ATTNPACK_HD inline int32_t* mask_list(const MaskPlan& m, void* workspace, int64_t list) {
  char* lists = static_cast<char*>(workspace) + m.begin + m.bytes_of_bits;
  return reinterpret_cast<int32_t*>(lists) + list * numbers_of_list(m);
}

// A step of a list, as one number: the step, and whether the mask hides any of its pairs.
struct ListedStep {
  int32_t number;
  ATTNPACK_HD static ListedStep of(int64_t step, bool hides) { return {static_cast<int32_t>(2 * step + hides)}; }
  ATTNPACK_HD int32_t step() const { return number >> 1; }
  ATTNPACK_HD bool hides() const { return number & 1; }
};
// The steps of a unit of work: those of its tile's list that hold keys of the unit.
struct ListedSteps {
  const int32_t* numbers;
  int32_t count;
  ATTNPACK_DEVICE ListedStep operator[](int i) const { return {numbers[i]}; }
};
ATTNPACK_DEVICE ListedSteps steps_of_unit(const MaskPlan& m, void* workspace, const Unit& u, int64_t tile_rows) {
  const int64_t of_head = (m.batches > 1 ? u.b : 0) * m.list_heads + (m.list_heads > 1 ? u.kv_head : 0);
  const int32_t* before = mask_list(m, workspace, of_head * m.tiles + u.first / tile_rows);
  const int32_t keys = static_cast<int32_t>(m.keys_of_step), begin = static_cast<int32_t>(u.keys.begin),
                end = static_cast<int32_t>(u.keys.end);
  const int32_t first = before[begin / keys], last = before[(end + keys - 1) / keys];
  return {before + m.steps + 1 + first, last - first};
}

// Packs the mask. A warp packs 16 words of one row.
constexpr int kMaskThreads = 128, kWordsOfWarp = 16, kWordsOfBlock = kMaskThreads / kWarp * kWordsOfWarp;
ATTNPACK_HD inline int64_t mask_blocks_of_row(const MaskPlan& m) {
  return (m.words + kWordsOfBlock - 1) / kWordsOfBlock;
}
ATTNPACK_HD inline int64_t mask_blocks(const MaskPlan& m) {
  return m.batches * m.heads * m.rows * mask_blocks_of_row(m);
}
ATTNPACK_DEVICE void pack_mask_block(const AttentionParams& p, const MaskPlan& m, void* workspace, int64_t block) {
  const int32_t blocks = static_cast<int32_t>(mask_blocks_of_row(m)), rows = static_cast<int32_t>(m.rows),
                row = static_cast<int32_t>(block) / blocks;
  const HeadPlace head = place_of_head(row / rows, m.heads);
  const int64_t query = row % rows, step = p.mask_strides.column;
  const bool* from = static_cast<const bool*>(p.mask) + head.batch * p.mask_strides.batch +
                     head.kv_head * p.mask_strides.head + query * p.mask_strides.row;
  uint32_t* to = mask_row(m, workspace, head.batch, head.kv_head, query);
  const int lane = thread_id() % kWarp, warp = thread_id() / kWarp;
  const int64_t first = static_cast<int32_t>(block) % blocks * kWordsOfBlock + warp * kWordsOfWarp;
  uint32_t mine = 0;
#pragma unroll 8
  for (int i = 0; i < kWordsOfWarp; ++i) {
    const int64_t key = (first + i) * kWarp + lane;
    const uint32_t word = ballot(key < p.kv_len && from[key * step]);
    if (lane == i) mine = word;
  }
  if (lane < kWordsOfWarp && first + lane < m.words) to[first + lane] = mine;
}

// Lists the steps of one tile, 32 of them at a time: a lane for each, and the tile's rows shared out among the warps.
struct MaskListShared {
  uint32_t seen[kMaskThreads / kWarp], hidden[kMaskThreads / kWarp];
};
ATTNPACK_DEVICE void list_steps_block(const AttentionParams& p, const MaskPlan& m, int64_t tile_rows, void* workspace,
                                      int64_t block, MaskListShared& shared) {
  const BlockPlace at = place_of_block(block, m.batches * m.list_heads, m.tiles, 1);
  const HeadPlace head = place_of_head(at.head, m.list_heads);
  const int32_t group = static_cast<int32_t>(group_size(p, head.kv_head)),
                first = static_cast<int32_t>(at.tile * tile_rows), left = group * static_cast<int32_t>(p.q_len) - first;
  const int rows = left < tile_rows ? left : static_cast<int>(tile_rows);
  const int lane = thread_id() % kWarp, warp = thread_id() / kWarp, words = static_cast<int>(m.keys_of_step) / 32;
  int32_t *before = mask_list(m, workspace, block), *listed = before + m.steps + 1, count = 0;
  for (int64_t begin = 0; begin < m.steps; begin += kWarp) {
    const int64_t step = begin + lane;
    bool seen = false, hidden = false;
    if (step < m.steps)
      for (int r = warp; r < rows; r += kMaskThreads / kWarp) {
        const int32_t query = (first + r) / group, member = (first + r) % group;
        const uint32_t* bits =
            mask_row(m, workspace, head.batch, group_head(p, head.kv_head, member), query) + step * words;
        for (int w = 0; w < words; ++w) {
          const int64_t keys = p.kv_len - (step * words + w) * 32;  // from the word's first one on
          const uint32_t there = keys >= 32 ? ~0u : keys > 0 ? (1u << keys) - 1 : 0;
          seen |= bits[w] != 0;
          hidden |= (~bits[w] & there) != 0;
        }
      }
    const uint32_t seen_by_warp = ballot(seen), hidden_from_warp = ballot(hidden);
    if (lane == 0) {
      shared.seen[warp] = seen_by_warp;
      shared.hidden[warp] = hidden_from_warp;
    }
    sync_block();
    uint32_t all_seen = 0, all_hidden = 0;
    for (int w = 0; w < kMaskThreads / kWarp; ++w) {
      all_seen |= shared.seen[w];
      all_hidden |= shared.hidden[w];
    }
    if (warp == 0 && step < m.steps) {
      const int32_t place = count + count_bits(all_seen & ((1u << lane) - 1));
      before[step] = place;
      if (all_seen >> lane & 1) listed[place] = ListedStep::of(step, all_hidden >> lane & 1).number;
    }
    count += count_bits(all_seen);
    sync_block();
  }
  if (thread_id() == 0) before[m.steps] = count;
}

// The bits of a lane's two rows for one step, as many words as the step has.
template <int Words>
struct alignas(4 * Words) MaskWords {
  uint32_t word[Words];
};
// Scores of pairs that the mask hides become -inf. s: fragments of 8 keys from the first bit on.
template <int Words>
ATTNPACK_DEVICE void hide_scores(const MaskWords<Words> (&bits)[2], float (&s)[4 * Words][4]) {
  const int column = place_in_c(thread_id() % kWarp, 0).column;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int w = 0; w < Words; ++w) {
      const uint32_t word = bits[h].word[w] >> column;
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!(word >> (8 * j + i) & 1)) s[4 * w + j][2 * h + i] = -infinity<float>();
    }
}

}  // namespace attnpack::cuda
