#pragma once

#include <attnpack/ops/cuda/kernels/plan.h>
#include <attnpack/ops/cuda/kernels/device.cuh>
#include <attnpack/ops/cuda/kernels/score.cuh>

// Writes a row's result: into out and lse, or, if the keys of a row are cut into parts, into a partial result (max,
// sum, values). The merge kernel joins the partial results (Flash-Decoding, Dao et al. 2023).
namespace attnpack::cuda {

template <class A>
ATTNPACK_HD inline A* partial_row(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int64_t head,
                                  int64_t part, int64_t row) {
  return static_cast<A*>(workspace) + ((head * plan.parts + part) * plan.rows + row) * (p.v_head_dim + 2);
}

// A tile of rows of one kv head against one part of the keys.
struct Unit {
  int64_t b, kv_head, first, part;
  Range keys;                   // keys of this part that some row of the tile may see
  int64_t sequence, first_key;  // packed sequences: its number, and where its keys begin; else b and 0
};
static_assert(sizeof(Unit) == kUnitBytes);

// The row of a unit's tile.
template <class A>
ATTNPACK_HD inline A* partial_row(const AttentionParams& p, const ForwardPlan& plan, void* workspace, const Unit& u,
                                  int64_t index) {
  const int64_t before = queries_of(p, u.sequence).begin * group_size(p, u.kv_head);
  return partial_row<A>(p, plan, workspace, u.b * p.num_kv_heads + u.kv_head, u.part, before + index);
}

// The keys of part number `part` of a sequence. The parts share out the keys that the sequence's rows see, in whole
// steps: where a cache is mostly empty, all parts still have work.
ATTNPACK_HD inline Range keys_of_part(const AttentionParams& p, const ForwardPlan& plan, int64_t sequence,
                                      int64_t part) {
  const Range seen = seen_keys(p, sequence);
  const int64_t steps = (seen.end - seen.begin + kSplitStep - 1) / kSplitStep;
  const int64_t keys = (steps + plan.parts - 1) / plan.parts * kSplitStep;
  return {seen.begin + part * keys, seen.begin + (part + 1) * keys};
}

// The last tiles come first: with causality they are the longest.
ATTNPACK_HD inline Unit unit_of(const AttentionParams& p, const ForwardPlan& plan, int64_t index) {
  const BlockPlace at = place_of_block(index, p.batch * p.num_kv_heads * plan.parts, plan.tiles, plan.section);
  const int32_t parts = static_cast<int32_t>(plan.parts);
  const HeadPlace head = place_of_head(at.head / parts, p.num_kv_heads);
  const PackedTile tile =
      place_of_tile(p, query_tokens(p, plan.most_group), plan.tile_rows, head.batch, plan.tiles - 1 - at.tile);
  Unit u{head.batch, head.kv_head, tile.tile * plan.tile_rows, at.head % parts, {}, tile.sequence, 0};
  u.first_key = keys_of(p, u.sequence).begin;
  u.keys =
      intersection(hull(p, u.sequence, u.kv_head, u.first, plan.tile_rows), keys_of_part(p, plan, u.sequence, u.part));
  return u;
}

// Writes columns [begin, end) of one row, every `step`-th. values(c) are still to be divided by the sum. first: whether
// this thread also writes the numbers that a row has once.
template <class S, class A, class Values>
ATTNPACK_DEVICE void write_row(const AttentionParams& p, const ForwardPlan& plan, void* workspace, const Unit& u,
                               int64_t index, const Row& row, Softmax<A> state, int64_t begin, int64_t end,
                               int64_t step, bool first, const Values& values) {
  if (plan.parts > 1) {
    A* to = partial_row<A>(p, plan, workspace, u, index);
    if (first) {
      to[0] = state.max;
      to[1] = state.sum;
    }
    for (int64_t c = begin; c < end; c += step) to[2 + c] = values(c);
    return;
  }
  const RowEnd<A> done = end_row(p, row.head, state);
  S* out = static_cast<S*>(p.out) + u.b * p.out_strides.batch + row.head * p.out_strides.head +
           row.query * p.out_strides.row;
  const A factor = done.factor / done.divisor;
  for (int64_t c = begin; c < end; c += step) narrow(values(c) * factor, out + c);
  if (first) static_cast<A*>(p.lse)[(u.b * p.num_heads + row.head) * p.q_len + row.query] = done.lse;
}

// The owners of one warp in a tile: `first`, `first + step`, ... before `end`. Columns [0, width) are in use.
struct BrokenOwners {
  int first, step, end, width;
};

// Adds to tile[owner * stride + c] the NaN and Inf in column c of all others that the owner sees. number(other, c): a
// number of another. sees.prepare(other) is asked once per other, and sees(owner, prepared) once per pair. A warp goes
// through its others 32 at a time. Most of them hold no NaN, so the time is about that of reading them once. Where an
// owner's columns are NaN already nothing is left to add: sums over a model that has diverged end at once. Out of line,
// because it is seldom needed and must not cost registers.
template <class Number, class Sees>
ATTNPACK_DEVICE_CALL void add_broken(float* tile, int stride, const BrokenOwners owners, Range others,
                                     const Number number, const Sees sees) {
  const int lane = thread_id() % kWarp;
  const auto is_open = [&](int owner) {  // whether any of its columns is not NaN yet
    bool open = false;
    for (int c = lane; c < owners.width; c += kWarp) open |= tile[owner * stride + c] == tile[owner * stride + c];
    return ballot(open) != 0;
  };
  bool any_open = false;
  for (int owner = owners.first; owner < owners.end; owner += owners.step) any_open |= is_open(owner);
  if (!any_open) return;
  for (int64_t begin = others.begin; begin < others.end; begin += kWarp) {
    const int count = static_cast<int>(others.end - begin < kWarp ? others.end - begin : kWarp);
    uint32_t broken = 0;
    for (int k = 0; k < count; ++k) {
      bool mine = false;
      for (int c = lane; c < owners.width; c += kWarp) mine |= !is_finite(number(begin + k, c));
      broken |= static_cast<uint32_t>(ballot(mine) != 0) << k;
    }
    if (!broken) continue;
    const bool is_broken = broken >> lane & 1;
    const auto prepared = sees.prepare(begin + (is_broken ? lane : 0));
    for (int owner = owners.first; owner < owners.end; owner += owners.step) {
      uint32_t seen = ballot(is_broken && sees(owner, prepared));
      if (!seen || !is_open(owner)) continue;
      for (int k = 0; seen; ++k, seen >>= 1)
        if (seen & 1)
          for (int c = lane; c < owners.width; c += kWarp)
            if (const float x = number(begin + k, c); !is_finite(x)) tile[owner * stride + c] += x;
    }
  }
}

// The owners are rows of a table, the others are keys.
struct RowSeesKey {
  const AttentionParams* p;
  int64_t b;
  const Row* rows;
  ATTNPACK_DEVICE int64_t prepare(int64_t key) const { return key; }
  ATTNPACK_DEVICE bool operator()(int owner, int64_t key) const { return row_sees(*p, b, rows[owner], key); }
};
// The owners are keys from `first` on, the others are rows of a kv head.
struct KeySeenByRow {
  const AttentionParams* p;
  int64_t sequence, kv_head, first;  // packed sequences have no mask, which would count by the batch
  ATTNPACK_DEVICE Row prepare(int64_t index) const { return make_row(*p, sequence, kv_head, index); }
  ATTNPACK_DEVICE bool operator()(int owner, const Row& row) const {
    return row_sees(*p, sequence, row, first + owner);
  }
};

// Writes a tile's first `count` rows from shared memory, one warp per row. state(r): row r's softmax; values(r): a
// function of the column. Returns whether this thread found NaN or Inf. An excluded key may have brought them in as 0 *
// NaN. Then the tile is computed once more, `cleaned`: zeros replace NaN and Inf among the values, and each row
// receives the NaN and Inf of the keys that it sees (add_broken). So the numbers of an excluded key change no bit.
template <class S, class State, class Values>
ATTNPACK_DEVICE bool write_tile(const AttentionParams& p, const ForwardPlan& plan, void* workspace, const Unit& u,
                                int count, const Row* rows, int threads, const State& state, const Values& values) {
  bool broken = false;
  const int lane = thread_id() % kWarp;
  for (int r = thread_id() / kWarp; r < count; r += threads / kWarp) {
    const auto value = values(r);
    write_row<S, float>(p, plan, workspace, u, u.first + r, rows[r], state(r), lane, p.v_head_dim, kWarp, lane == 0,
                        [&](int64_t c) {
                          const float x = value(c);
                          broken |= !is_finite(x);
                          return x;
                        });
  }
  return broken;
}

constexpr int kMergeThreads = static_cast<int>(kMostParts);
template <class A>
struct MergeShared {
  A weight[kMergeThreads], max[kMergeThreads / kWarp], sum[kMergeThreads / kWarp];
};

// A block joins the parts of one row of a kv head, in their order, for as many columns as it has threads. Thread i
// weighs part i; then each thread adds up its column.
ATTNPACK_HD inline int64_t merge_columns(const AttentionParams& p) {
  return p.v_head_dim > 0 ? (p.v_head_dim + kMergeThreads - 1) / kMergeThreads : 1;
}
ATTNPACK_HD inline int64_t merge_blocks(const AttentionParams& p, const ForwardPlan& plan) {
  return p.batch * p.num_kv_heads * plan.rows * merge_columns(p);
}
template <class S, class A>
ATTNPACK_DEVICE void merge_parts(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int64_t index,
                                 MergeShared<A>& shared) {
  const int64_t columns = merge_columns(p), row_index = index / columns % plan.rows, head = index / columns / plan.rows;
  const int64_t b = head / p.num_kv_heads, kv_head = head % p.num_kv_heads;
  const int64_t group = group_size(p, kv_head);
  if (row_index >= group * p.q_len) return;
  const int64_t query = row_index / group, query_head = group_head(p, kv_head, row_index % group);
  const auto part = [&](int64_t i) { return partial_row<A>(p, plan, workspace, head, i, row_index); };
  const int thread = thread_id(), warp = thread / kWarp;
  const bool has_part = thread < plan.parts;
  const Softmax<A> mine = has_part ? Softmax<A>{part(thread)[0], part(thread)[1]} : Softmax<A>{-infinity<A>(), 0};
  const A top = warp_max(mine.max);
  if (thread % kWarp == 0) shared.max[warp] = top;
  sync_block();
  Softmax<A> all{shared.max[0], 0};
#pragma unroll
  for (int w = 1; w < kMergeThreads / kWarp; ++w) all.max = larger(all.max, shared.max[w]);
  const A weight = mine.max == all.max ? A(1) : std::exp(mine.max - all.max), sum = warp_sum(mine.sum * weight);
  shared.weight[thread] = weight;
  if (thread % kWarp == 0) shared.sum[warp] = sum;
  sync_block();
#pragma unroll
  for (int w = 0; w < kMergeThreads / kWarp; ++w) all.sum += shared.sum[w];
  const RowEnd<A> done = end_row(p, query_head, all);
  S* out =
      static_cast<S*>(p.out) + b * p.out_strides.batch + query_head * p.out_strides.head + query * p.out_strides.row;
  if (const int64_t c = index % columns * kMergeThreads + thread; c < p.v_head_dim) {
    A value = 0;
#pragma unroll 16
    for (int64_t i = 0; i < plan.parts; ++i) value += part(i)[2 + c] * shared.weight[i];
    narrow(value * (done.factor / done.divisor), out + c);
  }
  if (index % columns == 0 && thread == 0)
    static_cast<A*>(p.lse)[(b * p.num_heads + query_head) * p.q_len + query] = done.lse;
}

}  // namespace attnpack::cuda
