#pragma once

#include <attnpack/ops/cuda/kernels/device.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>
#include <attnpack/ops/cuda/kernels/tiles.cuh>

// A bool mask as bits: bit i of word w of a row says whether the row may see key 32 w + i. For each tile there is a
// list of the steps that hold any pair it sees, so that kernels pass over the others, as FlexAttention (Dong et al.
// 2024) does. Here the numbers of the mask tell.
namespace attnpack::cuda {

// Where a row's words begin, and the words.
ATTNPACK_HD inline int64_t mask_place(const MaskBits& m, int64_t b, int64_t head, int64_t query) {
  return (((m.batches > 1 ? b : 0) * m.heads + (m.heads > 1 ? head : 0)) * m.rows + (m.rows > 1 ? query : 0)) * m.words;
}
ATTNPACK_HD inline uint32_t* mask_words(const MaskBits& m, void* workspace) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(workspace) + m.begin);
}
ATTNPACK_HD inline uint32_t* mask_row(const MaskBits& m, void* workspace, int64_t b, int64_t head, int64_t query) {
  return mask_words(m, workspace) + mask_place(m, b, head, query);
}
ATTNPACK_HD inline int32_t* mask_list(const MaskLists& l, void* workspace, int64_t list) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(workspace) + l.begin) + list * l.numbers;
}
ATTNPACK_HD inline int32_t* mask_list(const MaskLists& l, void* workspace, int64_t b, int64_t kv_head, int64_t tile) {
  const int64_t of_head = (l.batches > 1 ? b : 0) * l.kv_heads + (l.kv_heads > 1 ? kv_head : 0);
  return mask_list(l, workspace, of_head * l.tiles + (l.tiles > 1 ? tile : 0));
}

// A step of a list, as one number: the step, and whether the mask hides any of its pairs.
struct ListedStep {
  int32_t number;
  ATTNPACK_HD int32_t step() const { return number >> 1; }
  ATTNPACK_HD bool hides() const { return number & 1; }
};
struct ListedSteps {
  const int32_t* numbers;
  int32_t count;
  ATTNPACK_DEVICE ListedStep operator[](int i) const { return {numbers[i]}; }
};
// The steps of keys of a tile of rows that hold any of these keys.
ATTNPACK_DEVICE ListedSteps steps_of_keys(const MaskLists& l, void* workspace, int64_t b, int64_t kv_head, int64_t tile,
                                          const Range& keys) {
  const int32_t* before = mask_list(l, workspace, b, kv_head, tile);
  const int32_t step = static_cast<int32_t>(l.step), begin = static_cast<int32_t>(keys.begin),
                end = static_cast<int32_t>(keys.end);
  const int32_t first = before[begin / step], last = before[(end + step - 1) / step];
  return {before + l.steps + 1 + first, last - first};
}
// The steps of rows of a tile of keys.
ATTNPACK_DEVICE ListedSteps steps_of_rows(const MaskLists& l, void* workspace, int64_t b, int64_t kv_head,
                                          int64_t tile) {
  const int32_t* list = mask_list(l, workspace, b, kv_head, tile);
  return {list + 1, list[0]};
}

// Packs the mask. A warp packs 16 words of one row.
constexpr int kMaskThreads = 128, kMaskWarps = kMaskThreads / kWarp, kWordsOfWarp = 16,
              kWordsOfBlock = kMaskWarps * kWordsOfWarp;
ATTNPACK_HD inline int64_t mask_blocks_of_row(const MaskBits& m) {
  return (m.words + kWordsOfBlock - 1) / kWordsOfBlock;
}
ATTNPACK_HD inline int64_t mask_blocks(const MaskBits& m) {
  return m.batches * m.heads * m.rows * mask_blocks_of_row(m);
}
ATTNPACK_DEVICE void pack_mask_block(const AttentionParams& p, const MaskBits& m, void* workspace, int64_t block) {
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

// The first bits of a word: none if count is below 1, all from 32 on.
ATTNPACK_HD inline uint32_t first_bits(int64_t count) { return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0; }
// Whether a tile sees any pair of a step, and whether the mask hides any.
struct StepPairs {
  bool seen = false, hidden = false;
  // bits: of one row. keys: how many keys there are from the word's first one on. inside: those that its range leaves.
  ATTNPACK_DEVICE void add(uint32_t bits, int64_t keys, uint32_t inside = ~0u) {
    seen |= (bits & inside) != 0;
    hidden |= (~bits & first_bits(keys)) != 0;
  }
};
struct MaskListShared {
  uint32_t seen[kMaskWarps], hidden[kMaskWarps];
};
// Lists steps [0, steps): 32 at a time, a lane for each. pairs(step): what those of this warp say. before(step, count):
// told how many steps are listed before each. Returns how many there are.
template <class Pairs, class Before>
ATTNPACK_DEVICE int32_t list_steps(int32_t steps, int32_t* listed, MaskListShared& shared, const Pairs& pairs,
                                   const Before& before) {
  const int lane = thread_id() % kWarp, warp = thread_id() / kWarp;
  int32_t count = 0;
  for (int32_t begin = 0; begin < steps; begin += kWarp) {
    const int32_t step = begin + lane;
    const StepPairs mine = step < steps ? pairs(step) : StepPairs{};
    const uint32_t seen = ballot(mine.seen), hidden = ballot(mine.hidden);
    if (lane == 0) {
      shared.seen[warp] = seen;
      shared.hidden[warp] = hidden;
    }
    sync_block();
    uint32_t all_seen = 0, all_hidden = 0;
    for (int w = 0; w < kMaskWarps; ++w) {
      all_seen |= shared.seen[w];
      all_hidden |= shared.hidden[w];
    }
    if (warp == 0 && step < steps) {
      const int32_t place = count + count_bits(all_seen & ((1u << lane) - 1));
      before(step, place);
      if (all_seen >> lane & 1) listed[place] = 2 * step + static_cast<int32_t>(all_hidden >> lane & 1);
    }
    count += count_bits(all_seen);
    sync_block();
  }
  return count;
}

// The list of one tile of rows. The warps share out its rows.
ATTNPACK_DEVICE void list_keys_block(const AttentionParams& p, const MaskBits& m, const MaskLists& l, int64_t tile_rows,
                                     void* workspace, int64_t block, MaskListShared& shared) {
  const BlockPlace at = place_of_block(block, l.batches * l.kv_heads, l.tiles, 1);
  const HeadPlace head = place_of_head(at.head, l.kv_heads);
  // Rows are counted from the tile's first query on: 32 bits may not count all rows of a kv head.
  const int64_t members = group_size(p, head.kv_head), first = at.tile * tile_rows, left = members * p.q_len - first,
                query = left > 0 ? first / members : 0;
  const int32_t group = static_cast<int32_t>(members),
                begin = left > 0 ? static_cast<int32_t>(first - query * members) : 0,
                end = left > 0 ? begin + static_cast<int32_t>(left < tile_rows ? left : tile_rows) : 0;
  const int words = static_cast<int>(l.step) / 32;
  const auto pairs = [&](int32_t step) {
    StepPairs pairs;
    for (int32_t r = begin + thread_id() / kWarp; r < end; r += kMaskWarps) {
      const uint32_t* bits =
          mask_row(m, workspace, head.batch, group_head(p, head.kv_head, r % group), query + r / group) + step * words;
      for (int w = 0; w < words; ++w) pairs.add(bits[w], p.kv_len - (int64_t{step} * words + w) * 32);
    }
    return pairs;
  };
  int32_t* before = mask_list(l, workspace, block);
  const int32_t count = list_steps(static_cast<int32_t>(l.steps), before + l.steps + 1, shared, pairs,
                                   [&](int32_t step, int32_t place) { before[step] = place; });
  if (thread_id() == 0) before[l.steps] = count;
}

// The list of one tile of keys. The warps share out the rows of a step.
ATTNPACK_HD inline uint32_t bits_of_range(const Range& range, int64_t first) {  // of 32 from `first` on
  return first_bits(range.end - first) & ~first_bits(range.begin - first);
}
template <int TileKeys>
ATTNPACK_DEVICE void list_rows_block(const AttentionParams& p, const MaskBits& m, const MaskLists& l, void* workspace,
                                     int64_t block, MaskListShared& shared) {
  const BlockPlace at = place_of_block(block, l.batches * l.kv_heads, l.tiles, 1);
  const HeadPlace head = place_of_head(at.head, l.kv_heads);
  const int32_t of_head = static_cast<int32_t>((p.q_len + l.step - 1) / l.step),
                members = static_cast<int32_t>(group_size(p, head.kv_head));
  const auto pairs = [&](int32_t step) {
    StepPairs pairs;
    const int64_t query_head = group_head(p, head.kv_head, step / of_head), first = step % of_head * l.step,
                  end = first + l.step < p.q_len ? first + l.step : p.q_len;
    for (int64_t query = first + thread_id() / kWarp; query < end; query += kMaskWarps) {
      const Range keys = key_range(p, head.batch, query);
      const uint32_t* bits = mask_row(m, workspace, head.batch, query_head, query) + at.tile * (TileKeys / 32);
#pragma unroll
      for (int w = 0; w < TileKeys / 32; ++w) {
        const int64_t key = int64_t{at.tile} * TileKeys + 32 * w;
        pairs.add(bits[w], p.kv_len - key, bits_of_range(keys, key));
      }
    }
    return pairs;
  };
  int32_t* list = mask_list(l, workspace, block);
  const int32_t count = list_steps(members * of_head, list + 1, shared, pairs, [](int32_t, int32_t) {});
  if (thread_id() == 0) list[0] = count;
}

// The mask of a lane's two rows: where their bits begin, in fours of words.
struct LaneMask {
  uint32_t place[2];
  ATTNPACK_DEVICE void find(const MaskBits& m, int64_t b, const LaneRows& rows) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      place[h] = static_cast<uint32_t>(mask_place(m, b, rows.first[8 * h].head, rows.first[8 * h].query) / 4);
  }
};
// Their bits for one step, as many words as it has.
template <int Words>
struct alignas(4 * Words) MaskWords {
  uint32_t word[Words];
};
template <int Words>
ATTNPACK_DEVICE void load_mask(const MaskBits& m, void* workspace, const LaneMask& mask, int32_t first_key,
                               MaskWords<Words> (&bits)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t* row = mask_words(m, workspace) + int64_t{4} * mask.place[h];
    bits[h] = *reinterpret_cast<const MaskWords<Words>*>(row + first_key / 32);
  }
}
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
