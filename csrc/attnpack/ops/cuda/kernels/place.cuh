#pragma once

#include <attnpack/ops/cuda/kernels/table.h>
#include <attnpack/ops/cuda/kernels/device.cuh>

// Rotation of rows (RoPE), and the append to a cache in one tensor or in pages, which rotates keys and queries on the
// way.
namespace attnpack::cuda {

constexpr int kRopeThreads = 64;

ATTNPACK_HD inline int64_t offset_of(const Strides& s, int64_t b, int64_t head, int64_t row) {
  return b * s.batch + head * s.head + row * s.row;
}

// One row of `dim` numbers: pairs (i, i + half), or (2i, 2i + 1) if interleaved (Su et al. 2021, section 3.4.2).
// Numbers lie `step` apart. `threads` threads share the row.
template <class S, class Table>
ATTNPACK_DEVICE void rotate_numbers(bool interleaved, int64_t half, int64_t dim, const S* from, int64_t from_step,
                                    const Table* cos, int64_t cos_step, const Table* sin, int64_t sin_step, S* to,
                                    int64_t to_step, int thread, int threads) {
  using A = typename Accumulation<S>::type;
  const int64_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : half;
  for (int64_t i = thread; i < half; i += threads) {
    const A first = widen(from[i * step * from_step]), second = widen(from[(i * step + partner) * from_step]);
    const A c = static_cast<A>(cos[i * cos_step]), s = static_cast<A>(sin[i * sin_step]);
    narrow(first * c - second * s, to + i * step * to_step);
    narrow(second * c + first * s, to + (i * step + partner) * to_step);
  }
  for (int64_t d = 2 * half + thread; d < dim; d += threads) to[d * to_step] = from[d * from_step];
}

template <class S, class Table>
ATTNPACK_DEVICE void rotate_row(const RopeParams& p, int64_t block) {
  const int64_t row = block % p.length, head = block / p.length % p.num_heads, b = block / p.length / p.num_heads;
  rotate_numbers(p.interleaved, p.half, p.dim, static_cast<const S*>(p.x) + offset_of(p.x_strides, b, head, row),
                 p.x_strides.column, static_cast<const Table*>(p.cos) + offset_of(p.cos_strides, b, head, row),
                 p.cos_strides.column, static_cast<const Table*>(p.sin) + offset_of(p.sin_strides, b, head, row),
                 p.sin_strides.column, static_cast<S*>(p.out) + offset_of(p.out_strides, b, head, row),
                 p.out_strides.column, thread_id(), kRopeThreads);
}

constexpr int kPlaceThreads = 128, kPlaceRows = 8;  // kPlaceRows: heads that share the angles of a token

// A new token: where it comes from, and where it goes.
struct Token {
  int64_t b, from_batch, from_row;  // from_batch, from_row: its place in query, key and value
  int64_t position;                 // in its sequence
  int64_t slot;                     // in the cache; -1: it is not to be written
};

// The sequence of packed token t: the last one that begins at or before it.
ATTNPACK_HD inline int64_t sequence_of(const int64_t* ends, int64_t batch, int64_t t) {
  int64_t low = 0, high = batch - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    ends[middle] <= t ? low = middle : high = middle - 1;
  }
  return low;
}

// Positions beyond the capacity are not written, so that no call waits for the device.
ATTNPACK_HD inline Token token_of(const PlaceParams& p, int64_t index) {
  Token t;
  int64_t among_new;
  if (p.cu_seqlens) {
    t.b = sequence_of(p.cu_seqlens, p.batch, index);
    t.from_batch = 0;
    t.from_row = index;
    among_new = index - p.cu_seqlens[t.b];
  } else {
    t.b = t.from_batch = index / p.new_positions;
    t.from_row = among_new = index % p.new_positions;
  }
  const int64_t length = p.lengths[t.b * p.lengths_stride];
  t.position = length + among_new;
  t.slot = t.position - (p.dropped ? p.dropped[t.b * p.dropped_stride] : 0);
  const bool valid = length >= 0 && t.slot >= among_new && t.slot < p.capacity &&
                     (p.cu_seqlens || among_new < (p.new_lens ? p.new_lens[t.b] : p.new_positions));
  if (!valid) t.slot = -1;
  return t;
}

// Row `slot` of a kv head, or null where the table names no page.
template <class S>
ATTNPACK_HD inline S* cache_row(const PlaceParams& p, void* cache, const Strides& s, const Token& t, int64_t head) {
  S* base = static_cast<S*>(cache) + head * s.head;
  if (!p.block_table) return base + t.b * s.batch + t.slot * s.row;
  const int64_t page = p.block_table[t.b * p.table_stride + t.slot / p.page_size];
  return page >= 0 && page < p.num_pages ? base + page * s.batch + t.slot % p.page_size * s.row : nullptr;
}

// Copies a row by one warp: 16 bytes at once where both rows allow it.
template <class S>
ATTNPACK_DEVICE void copy_row(const S* from, int64_t from_step, S* to, int64_t to_step, int64_t dim) {
  struct alignas(16) Words {
    uint32_t x[4];
  };
  const int lane = thread_id() % kWarp;
  const uintptr_t all = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                        static_cast<uintptr_t>(dim * static_cast<int64_t>(sizeof(S)));
  if (from_step == 1 && to_step == 1 && all % 16 == 0)
    for (int64_t i = lane; i < dim * static_cast<int64_t>(sizeof(S)) / 16; i += kWarp)
      reinterpret_cast<Words*>(to)[i] = reinterpret_cast<const Words*>(from)[i];
  else
    for (int64_t i = lane; i < dim; i += kWarp) to[i * to_step] = from[i * from_step];
}

struct PlaceShared {
  float cos[kMostRopeHalf], sin[kMostRopeHalf];
};

// One token, for kPlaceRows of its heads: first those of the queries, then keys, then values.
template <class S, bool Rotates>
ATTNPACK_DEVICE void place_block(const PlaceParams& p, int64_t block, PlaceShared& shared) {
  const int64_t rows = p.num_heads + 2 * p.num_kv_heads, groups = (rows + kPlaceRows - 1) / kPlaceRows;
  const Token t = token_of(p, block / groups);
  if constexpr (Rotates) {
    for (int i = thread_id(); i < p.half; i += kPlaceThreads) {
      const double angle = static_cast<double>(t.position) * p.inv_freq[i];
      shared.cos[i] = static_cast<float>(std::cos(angle) * p.factor);
      shared.sin[i] = static_cast<float>(std::sin(angle) * p.factor);
    }
    sync_block();
  }
  for (int64_t r = block % groups * kPlaceRows + thread_id() / kWarp, n = thread_id() / kWarp;
       n < kPlaceRows && r < rows; r += kPlaceThreads / kWarp, n += kPlaceThreads / kWarp) {
    const auto from = [&](const void* x, const Strides& s, int64_t head) {
      return static_cast<const S*>(x) + t.from_batch * s.batch + head * s.head + t.from_row * s.row;
    };
    const bool of_query = r < p.num_heads, of_key = r < p.num_heads + p.num_kv_heads;
    const int64_t head = of_query ? r : (r - p.num_heads) % p.num_kv_heads;
    if (!of_query && t.slot < 0) continue;
    if (!of_key) {
      if (S* to = cache_row<S>(p, p.cache_value, p.cache_value_strides, t, head))
        copy_row(from(p.value, p.value_strides, head), p.value_strides.column, to, p.cache_value_strides.column,
                 p.v_head_dim);
      continue;
    }
    const Strides &in = of_query ? p.query_strides : p.key_strides,
                  &out = of_query ? p.rotated_strides : p.cache_key_strides;
    const S* x = from(of_query ? p.query : p.key, in, head);
    S* to = of_query ? static_cast<S*>(p.rotated) + t.from_batch * out.batch + head * out.head + t.from_row * out.row
                     : cache_row<S>(p, p.cache_key, p.cache_key_strides, t, head);
    if (!to) continue;
    if constexpr (Rotates)
      rotate_numbers<S, float>(p.interleaved, p.half, p.head_dim, x, in.column, shared.cos, 1, shared.sin, 1, to,
                               out.column, thread_id() % kWarp, kWarp);
    else
      copy_row(x, in.column, to, out.column, p.head_dim);
  }
}

// Adds the new positions to the length of sequence b, up to a full cache.
ATTNPACK_DEVICE void advance_length(const PlaceParams& p, int64_t b) {
  int64_t* length = const_cast<int64_t*>(p.lengths) + b * p.lengths_stride;
  const int64_t most = p.capacity + (p.dropped ? p.dropped[b * p.dropped_stride] : 0);
  const int64_t count = p.cu_seqlens ? p.cu_seqlens[b + 1] - p.cu_seqlens[b]
                        : p.new_lens ? p.new_lens[b]
                                     : p.new_positions;
  *length = *length + count < most ? *length + count : most;
}

}  // namespace attnpack::cuda
