#pragma once

#include <algorithm>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <attnpack/ops/cpu/isa/kernels.h>
#include <attnpack/threads/scratch.h>

// Cuts attention calls into units of work. No headers of torch: for_each(order, count, work, scratch_bytes, unit) hands
// the units 0 .. count - 1 to the threads, and calls unit(index, scratch). for_each.count() is the number of threads.
// Only the caller asks for it, because a worker may get another number. The calls of a list share dtype, heads, head
// dims and batch. Their units run in one loop, so that short sequences fill all threads.
namespace attnpack {

// The unit that a thread takes next. kInTurn: the first one that is left. kNeighbours: neighbours, one after the other,
// because each unit prefetches the memory of the next one while it reads its own.
enum class Order { kInTurn, kNeighbours };

using Calls = std::span<const AttentionParams>;

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

inline int64_t count_seen(const AttentionParams& p, int64_t b) {
  const Range keys = seen_keys(p, b);
  return std::max<int64_t>(keys.end - keys.begin, 0);
}

// Whether the rows of a kv head of sequence b are so few that they stream the keys. Else the keys are packed, which
// pays for few rows too if the keys are few. Padding and keys outside the window do not count.
inline bool streams_keys(const AttentionParams& p, const Tiling& t, int64_t b) {
  if (p.quantized_bits) return true;  // no other unit reads them
  if (t.rows > kDecodeRows) return false;
  const int64_t keys = count_seen(p, b);
  return keys > kShortKeys || t.rows <= (keys > kFewKeys ? kShortRows : kFewKeysRows) ||
         p.head_dim + p.v_head_dim > kShortWidth;
}

// Whether all sequences of a call stream their keys, or all pack them, or some do this and some do that.
enum class Path { kStreamed, kPacked, kMixed };
inline Path path_of(const AttentionParams& p, const Tiling& t) {
  int64_t streamed = 0;
  const int64_t count = p.kv_lens || p.q_offsets ? p.batch : 1;
  for (int64_t b = 0; b < count; ++b) streamed += streams_keys(p, t, b);
  return streamed == 0 ? Path::kPacked : streamed == count ? Path::kStreamed : Path::kMixed;
}

// Counts things of several calls, one call after the other. A list of one call allocates nothing.
class Counts {
 public:
  template <class CountOf>
  Counts(size_t calls, const CountOf& count_of) {
    if (calls > 1) ends_.reserve(calls);
    for (size_t i = 0; i < calls; ++i) {
      total_ += count_of(i);
      if (calls > 1) ends_.push_back(total_);
    }
  }
  int64_t total() const { return total_; }
  // How many things the calls before this one have.
  int64_t before(size_t call) const { return call ? ends_[call - 1] : 0; }
  // The call that has thing number n, and the thing's number within that call.
  std::pair<size_t, int64_t> find(int64_t n) const {
    if (ends_.empty()) return {0, n};
    const size_t call = std::upper_bound(ends_.begin(), ends_.end(), n) - ends_.begin();
    return {call, n - before(call)};
  }

 private:
  std::vector<int64_t> ends_;
  int64_t total_ = 0;
};

// How many tiles of rows one unit of prefill has, so that the threads end soonest. Packing a unit's keys takes about a
// quarter of a tile's products. calls: how many are like p.
inline int64_t tiles_of_unit(const AttentionParams& p, const Tiling& t, int64_t calls, int64_t threads) {
  constexpr double kPacking = 0.25;
  int64_t best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t tiles = 1; tiles <= most_tiles_together(p); tiles *= 2) {
    const int64_t units = calls * t.kv_heads * ((t.tiles + tiles - 1) / tiles);
    const double time = (units + threads - 1) / threads * (tiles + kPacking);
    if (time <= least) best = tiles, least = time;
  }
  return best;
}

// Whether a unit of prefill is a whole head of one tile. Its rows fill register tiles better than those of two tiles,
// but half as many units may leave threads without work.
inline bool takes_whole_heads(const Tiling& t, int64_t calls, int64_t threads) {
  return t.rows <= kWholeHeadRows && calls * t.kv_heads >= 4 * threads;
}

// The tiles of rows, the last first: with causality they are the longest. The tiles of a head share its packed keys.
template <class ForEach>
void run_prefill(const Kernels& kernels, Calls calls, ForEach&& for_each) {
  // A thread's scratch begins with the number of the call that used it last, + 1. Another call has another layout
  // there, so its first unit clears the flags.
  constexpr size_t kHeader = 64;
  // Asked once, as in run_ranges.
  const int64_t threads = std::max<int64_t>(for_each.count(), 1);
  const auto rows_of_unit = [&](size_t call, const Tiling& t) {
    if (takes_whole_heads(t, static_cast<int64_t>(calls.size()), threads)) return kWholeHeadRows;
    return tiles_of_unit(calls[call], t, static_cast<int64_t>(calls.size()), threads) * kTileQueryRows;
  };
  const auto units_of_head = [](const Tiling& t, int64_t rows) { return (t.rows + rows - 1) / rows; };
  double work = 0;
  size_t scratch_bytes = 0;
  const Counts units(calls.size(), [&](size_t i) {
    const Tiling t = tile_rows(calls[i]);
    if (path_of(calls[i], t) == Path::kStreamed) return int64_t{0};
    work += t.work;
    scratch_bytes = std::max(scratch_bytes, kernels.prefill_scratch(calls[i]));
    return t.kv_heads * units_of_head(t, rows_of_unit(i, t));
  });
  if (units.total() == 0) return;
  for_each(Order::kNeighbours, units.total(), work, kHeader + scratch_bytes, [&](int64_t unit, void* scratch) {
    const auto [call, index] = units.find(unit);
    const AttentionParams& p = calls[call];
    const Tiling t = tile_rows(p);
    const int64_t step = rows_of_unit(call, t), of_head = units_of_head(t, step);
    const int64_t b = index / of_head / p.num_kv_heads, kv_head = index / of_head % p.num_kv_heads;
    if (streams_keys(p, t, b)) return;
    void* const memory = static_cast<char*>(scratch) + kHeader;
    int64_t& last_call = *static_cast<int64_t*>(scratch);
    if (last_call != static_cast<int64_t>(call) + 1) *static_cast<int64_t*>(memory) = 0;
    last_call = static_cast<int64_t>(call) + 1;
    const int64_t begin = (of_head - 1 - index % of_head) * step;
    const Range rows{begin, std::min(begin + step, group_size(p, kv_head) * p.q_len)};
    if (!rows.empty()) kernels.prefill(p, b, kv_head, rows, memory);
  });
}

// The most ranges of keys that a sequence of the call has. Shorter sequences end with empty ranges.
inline int64_t most_ranges(const AttentionParams& p) {
  int64_t ranges = 1;
  for (int64_t b = 0; b < p.batch; ++b) ranges = std::max(ranges, key_ranges(p, count_seen(p, b)));
  return ranges;
}

// How many kv heads one unit of decode reads in turn, so that each thread has a few units. calls: how many are like p.
inline int64_t heads_of_unit(const AttentionParams& p, int64_t ranges, int64_t calls, int64_t threads) {
  constexpr int64_t kUnitsPerThread = 4;
  int64_t heads = heads_in_turn(p);
  while (heads > 1 && calls * p.batch * ranges * ((p.num_kv_heads + heads - 1) / heads) < kUnitsPerThread * threads)
    heads = (heads + 1) / 2;
  return heads;
}

// For few rows per kv head. The head's keys are cut into ranges, whose results are joined at the end. If each head has
// one range, its unit joins the results at once: thousands of heads with a handful of keys then cost one loop.
template <class ForEach>
void run_ranges(const Kernels& kernels, Calls calls, ForEach&& for_each) {
  // Asked once: a worker may give another number than its caller, and every unit must be cut alike.
  const int64_t threads = for_each.count();
  double work = 0, merge_work = 0;
  size_t decode_bytes = 0;
  int64_t rows_at_once = 0;  // most rows of the heads of a unit that joins its own results
  const auto ranges_of = [&, first = calls.size() == 1 ? most_ranges(calls[0]) : 0](size_t call) {
    return first ? first : most_ranges(calls[call]);
  };
  const auto heads_of = [&](size_t call) { return heads_of_unit(calls[call], ranges_of(call), calls.size(), threads); };
  const auto shares_of = [&](size_t call) { return (calls[call].num_kv_heads + heads_of(call) - 1) / heads_of(call); };
  const auto merges_of = [](const Tiling& t) { return (t.rows + kMergedRows - 1) / kMergedRows; };
  const auto streams = [&](size_t i, const Tiling& t) { return t.rows > 0 && path_of(calls[i], t) != Path::kPacked; };
  const Counts units(calls.size(), [&](size_t i) {
    const Tiling t = tile_rows(calls[i]);
    if (!streams(i, t)) return int64_t{0};
    work += t.work;
    decode_bytes = std::max(decode_bytes, kernels.decode_scratch(calls[i]));
    if (ranges_of(i) == 1) rows_at_once = std::max(rows_at_once, heads_of(i) * t.rows);
    return calls[i].batch * shares_of(i) * ranges_of(i);
  });
  if (units.total() == 0) return;
  const auto joined_later = [&](size_t i, const Tiling& t) { return streams(i, t) && ranges_of(i) > 1; };
  const Counts partial_rows(calls.size(), [&](size_t i) {
    const Tiling t = tile_rows(calls[i]);
    return joined_later(i, t) ? t.kv_heads * ranges_of(i) * t.rows : int64_t{0};
  });
  const Counts merges(calls.size(), [&](size_t i) {
    const Tiling t = tile_rows(calls[i]);
    if (!joined_later(i, t)) return int64_t{0};
    merge_work += static_cast<double>(t.kv_heads * ranges_of(i) * t.rows * calls[i].v_head_dim);
    return t.kv_heads * merges_of(t);
  });
  const AttentionParams& any = calls[0];
  const size_t row_bytes = (any.v_head_dim + 2) * (any.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
  const ThreadScratch<1> partials(partial_rows.total() * row_bytes);
  const auto partial = [&](size_t call, int64_t ranges, int64_t head, int64_t range) {
    const AttentionParams& p = calls[call];
    const int64_t rows = group_size(p, head % p.num_kv_heads) * p.q_len;
    const int64_t first = partial_rows.before(call) + head * ranges * tile_rows(p).rows + range * rows;
    return static_cast<char*>(partials.data()) + first * row_bytes;
  };
  const auto unit_of_ranges = [&](int64_t unit, void* scratch) {
    const auto [call, index] = units.find(unit);
    const AttentionParams& p = calls[call];
    const int64_t ranges = ranges_of(call), shares = shares_of(call), heads = heads_of(call);
    const int64_t range = index % ranges, b = index / ranges / shares, first = index / ranges % shares * heads;
    const Tiling t = tile_rows(p);
    if (!streams_keys(p, t, b)) return;
    const Range kv_heads{first, std::min(first + heads, p.num_kv_heads)};
    const int64_t seen = count_seen(p, b), own_ranges = key_ranges(p, seen), first_key = seen_keys(p, b).begin;
    const Range keys{first_key + range_begin(seen, own_ranges, range),
                     first_key + range_begin(seen, own_ranges, range + 1)};
    void* results[kHeadsInTurn];
    for (int64_t h = kv_heads.begin; h < kv_heads.end; ++h)
      results[h - first] = ranges == 1 ? static_cast<char*>(scratch) + decode_bytes + (h - first) * t.rows * row_bytes
                                       : partial(call, ranges, b * p.num_kv_heads + h, range);
    kernels.decode(p, b, kv_heads, keys, results, scratch);
    for (int64_t h = kv_heads.begin; ranges == 1 && h < kv_heads.end; ++h)
      kernels.merge(p, b, h, {0, group_size(p, h) * p.q_len}, results[h - first], 1);
  };
  for_each(Order::kNeighbours, units.total(), work, decode_bytes + rows_at_once * row_bytes, unit_of_ranges);
  if (merges.total() == 0) return;
  for_each(Order::kInTurn, merges.total(), merge_work, 0, [&](int64_t unit, void*) {
    const auto [call, index] = merges.find(unit);
    const AttentionParams& p = calls[call];
    const int64_t ranges = ranges_of(call), of_head = merges_of(tile_rows(p)), head = index / of_head;
    const int64_t kv_head = head % p.num_kv_heads, begin = index % of_head * kMergedRows;
    if (!streams_keys(p, tile_rows(p), head / p.num_kv_heads)) return;
    const Range rows{begin, std::min(begin + kMergedRows, group_size(p, kv_head) * p.q_len)};
    if (!rows.empty()) kernels.merge(p, head / p.num_kv_heads, kv_head, rows, partial(call, ranges, head, 0), ranges);
  });
}

template <class ForEach>
void run_forward(const Kernels& kernels, Calls calls, ForEach&& for_each) {
  run_prefill(kernels, calls, for_each);
  run_ranges(kernels, calls, for_each);
}

inline int64_t key_blocks(const AttentionParams& p) {
  const int64_t step = backward_block(p.head_dim, p.v_head_dim);
  return (p.kv_len + step - 1) / step;
}

// bp.tiles of each call is the number of tiles that tile_rows gives. Without keys no unit runs, and nothing is written.
template <class ForEach>
void run_backward(const Kernels& kernels, std::span<const AttentionBackwardParams> calls, ForEach&& for_each) {
  if (calls.empty()) return;
  const AttentionParams& any = calls[0].forward;
  const int64_t heads = any.batch * any.num_kv_heads, step = backward_block(any.head_dim, any.v_head_dim);
  struct Block {
    size_t call;
    int64_t index;
  };
  // The outer order is by blocks, then by calls, the inner by heads. So units that run at the same time seldom wait for
  // each other, and under causality the longest come first.
  std::vector<Block> blocks;
  int64_t count = 0;
  double work = 0;
  for (const AttentionBackwardParams& bp : calls) {
    work += 4 * tile_rows(bp.forward).work;
    count += key_blocks(bp.forward);
  }
  if (calls.size() > 1) {
    blocks.reserve(count);
    for (size_t i = 0; i < calls.size(); ++i)
      for (int64_t block = 0; block < key_blocks(calls[i].forward); ++block) blocks.push_back({i, block});
    std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.index < b.index; });
  }
  for_each(Order::kInTurn, count * heads, work, kernels.backward_scratch(any), [&](int64_t unit, void* scratch) {
    const int64_t head = unit % heads, n = unit / heads;
    const Block block = blocks.empty() ? Block{0, n} : blocks[n];
    const AttentionBackwardParams& bp = calls[block.call];
    const int64_t begin = block.index * step;
    kernels.backward(bp, head / any.num_kv_heads, head % any.num_kv_heads,
                     {begin, std::min(begin + step, bp.forward.kv_len)}, scratch);
  });
}

}  // namespace attnpack
