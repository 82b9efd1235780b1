#pragma once

#include <algorithm>

#include <attnpack/ops/cpu/isa/kernels.h>
#include <attnpack/ops/cpu/scratch.h>

// Cuts an attention call into units of work. No headers of torch: for_each(order, count, work, scratch_bytes, unit)
// hands the units 0 .. count - 1 to the threads, and calls unit(index, scratch).
namespace attnpack {

// The unit that a thread takes next. kInTurn: the first one that is left. kNeighbours: neighbours, one after the other,
// because each unit prefetches the memory of the next one while it reads its own.
enum class Order { kInTurn, kNeighbours };

struct Tiling {
  int64_t kv_heads, rows, tiles;  // (batch, kv head) pairs; the most rows of a pair; tiles of these rows
  double work;                    // multiply-adds of one product, roughly
};

inline Tiling tile_rows(const AttentionParams& p) {
  int64_t group = p.num_kv_heads ? group_size(p, 0) : 0;
  for (int64_t h = 1; p.group_start && h < p.num_kv_heads; ++h) group = std::max(group, group_size(p, h));
  const int64_t rows = group * p.q_len;
  return {p.batch * p.num_kv_heads, rows, (rows + kTileQueryRows - 1) / kTileQueryRows,
          static_cast<double>(p.batch) * p.num_heads * p.q_len * p.kv_len * (p.head_dim + p.v_head_dim)};
}

// The tiles of rows, the last first: with causality they are the longest. The tiles of a head share its packed keys.
template <class ForEach>
void run_prefill(const Kernels& kernels, const AttentionParams& p, const Tiling& t, ForEach&& for_each) {
  for_each(Order::kNeighbours, t.kv_heads * t.tiles, t.work, kernels.prefill_scratch(p),
           [&](int64_t index, void* scratch) {
             const int64_t b = index / t.tiles / p.num_kv_heads, kv_head = index / t.tiles % p.num_kv_heads;
             const int64_t begin = (t.tiles - 1 - index % t.tiles) * kTileQueryRows;
             const Range rows{begin, std::min(begin + kTileQueryRows, group_size(p, kv_head) * p.q_len)};
             if (!rows.empty()) kernels.prefill(p, b, kv_head, rows, scratch);
           });
}

// For few rows per kv head. The head's keys are cut into ranges, whose results are joined at the end.
template <class ForEach>
void run_ranges(const Kernels& kernels, const AttentionParams& p, const Tiling& t, ForEach&& for_each) {
  int64_t ranges = 1;  // the most ranges of a sequence; shorter sequences end with empty ranges
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t keys = range_keys(p, b);
    ranges = std::max(ranges, (valid_keys(p, b) + keys - 1) / keys);
  }
  const size_t row_bytes = (p.v_head_dim + 2) * (p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
  const ThreadScratch<1> partials(t.kv_heads * ranges * t.rows * row_bytes);
  const auto partial = [&](int64_t head, int64_t range) {
    const int64_t rows = group_size(p, head % p.num_kv_heads) * p.q_len;
    return static_cast<char*>(partials.data()) + (head * ranges * t.rows + range * rows) * row_bytes;
  };
  for_each(
      Order::kNeighbours, t.kv_heads * ranges, t.work, kernels.decode_scratch(p), [&](int64_t unit, void* scratch) {
        const int64_t head = unit / ranges, range = unit % ranges, b = head / p.num_kv_heads, keys = range_keys(p, b);
        kernels.decode(p, b, head % p.num_kv_heads, {range * keys, std::min((range + 1) * keys, p.kv_len)},
                       partial(head, range), scratch);
      });
  const int64_t merges = (t.rows + kMergedRows - 1) / kMergedRows;
  for_each(Order::kInTurn, t.kv_heads * merges, static_cast<double>(t.kv_heads * ranges * t.rows * p.v_head_dim), 0,
           [&](int64_t unit, void*) {
             const int64_t head = unit / merges, kv_head = head % p.num_kv_heads, begin = unit % merges * kMergedRows;
             const Range rows{begin, std::min(begin + kMergedRows, group_size(p, kv_head) * p.q_len)};
             if (!rows.empty()) kernels.merge(p, head / p.num_kv_heads, kv_head, rows, partial(head, 0), ranges);
           });
}

template <class ForEach>
void run_forward(const Kernels& kernels, const AttentionParams& p, ForEach&& for_each) {
  const Tiling t = tile_rows(p);
  if (t.rows == 0) return;
  if (t.rows <= kDecodeRows)
    run_ranges(kernels, p, t, for_each);
  else
    run_prefill(kernels, p, t, for_each);
}

// bp.tiles is the number of tiles that tile_rows gives. Without keys no unit runs, and nothing is written.
template <class ForEach>
void run_backward(const Kernels& kernels, const AttentionBackwardParams& bp, ForEach&& for_each) {
  const AttentionParams& p = bp.forward;
  const Tiling t = tile_rows(p);
  const int64_t step = backward_block(p.head_dim, p.v_head_dim), blocks = (p.kv_len + step - 1) / step;
  // The outer order is by blocks, the inner by heads. So units that run at the same time seldom wait for each other,
  // and under causality the longest come first.
  for_each(Order::kInTurn, blocks * t.kv_heads, 4 * t.work, kernels.backward_scratch(p),
           [&](int64_t unit, void* scratch) {
             const int64_t head = unit % t.kv_heads, begin = unit / t.kv_heads * step;
             kernels.backward(bp, head / p.num_kv_heads, head % p.num_kv_heads,
                              {begin, std::min(begin + step, p.kv_len)}, scratch);
           });
}

}  // namespace attnpack
