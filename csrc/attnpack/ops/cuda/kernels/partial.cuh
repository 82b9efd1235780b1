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
  return static_cast<A*>(workspace) + ((head * plan.split.parts + part) * plan.rows + row) * (p.v_head_dim + 2);
}

// A tile of rows of one kv head against one part of the keys.
struct Unit {
  int64_t b, kv_head, first, part;
  Range keys;  // keys of this part that some row of the tile may see
};

// The last tiles come first: with causality they are the longest.
ATTNPACK_HD inline Unit unit_of(const AttentionParams& p, const ForwardPlan& plan, int64_t index) {
  const int64_t tile = plan.tiles - 1 - index % plan.tiles, head = index / plan.tiles / plan.split.parts;
  Unit u{
      head / p.num_kv_heads, head % p.num_kv_heads, tile * plan.tile_rows, index / plan.tiles % plan.split.parts, {}};
  u.keys = intersection(hull(p, u.b, u.kv_head, u.first, plan.tile_rows),
                        {u.part * plan.split.keys, (u.part + 1) * plan.split.keys});
  return u;
}

// Writes columns [begin, end) of one row, every `step`-th. values(c) are still to be divided by the sum. first: whether
// this thread also writes the numbers that a row has once.
template <class S, class A, class Values>
ATTNPACK_DEVICE void write_row(const AttentionParams& p, const ForwardPlan& plan, void* workspace, const Unit& u,
                               int64_t index, const Row& row, Softmax<A> state, int64_t begin, int64_t end,
                               int64_t step, bool first, const Values& values) {
  if (plan.split.parts > 1) {
    A* to = partial_row<A>(p, plan, workspace, u.b * p.num_kv_heads + u.kv_head, u.part, index);
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
  for (int64_t c = begin; c < end; c += step) narrow(values(c) * done.factor / done.divisor, out + c);
  if (first) static_cast<A*>(p.lse)[(u.b * p.num_heads + row.head) * p.q_len + row.query] = done.lse;
}

// The NaN or Inf that the values bring into column c of a row. They come from all values whose keys the row sees. Out
// of line: it is seldom needed and must not cost registers.
template <class S>
ATTNPACK_DEVICE_CALL float broken_part(const AttentionParams& p, const Unit& u, const Row& row, int64_t c) {
  const S* value = static_cast<const S*>(p.value) + u.b * p.value_strides.batch + u.kv_head * p.value_strides.head + c;
  float sum = 0;
  for (int64_t key = u.keys.begin; key < u.keys.end && sum == sum; ++key) {
    const float x = widen(value[key * p.value_strides.row]);
    if (!is_finite(x) && finish_score(p, u.b, row, key, 0.f) != -infinity<float>()) sum += x;
  }
  return sum;
}

// Writes a tile's first `count` rows from shared memory, one warp per row. state(r): row r's softmax. Returns whether
// this thread found NaN or Inf. An excluded key may have brought them in as 0 * NaN. Then the tile is computed once
// more, `cleaned`: zeros replace NaN and Inf among the values, and each row receives the NaN and Inf of the keys that
// it sees. So the numbers of an excluded key change no bit.
template <class S, class State>
ATTNPACK_DEVICE bool write_tile(const AttentionParams& p, const ForwardPlan& plan, void* workspace, const Unit& u,
                                int count, const Row* rows, const float* out, int width, int threads, bool cleaned,
                                const State& state) {
  bool broken = false;
  const int lane = thread_id() % kWarp;
  for (int r = thread_id() / kWarp; r < count; r += threads / kWarp)
    write_row<S, float>(p, plan, workspace, u, u.first + r, rows[r], state(r), lane, p.v_head_dim, kWarp, lane == 0,
                        [&](int64_t c) {
                          float x = out[r * width + c];
                          if (cleaned) x += broken_part<S>(p, u, rows[r], c);
                          broken |= !is_finite(x);
                          return x;
                        });
  return broken;
}

// Joins the parts of one row of a kv head, in their order.
template <class S, class A>
ATTNPACK_DEVICE void merge_parts(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int64_t index,
                                 int threads) {
  const int64_t row_index = index % plan.rows, head = index / plan.rows;
  const int64_t b = head / p.num_kv_heads, kv_head = head % p.num_kv_heads;
  if (row_index >= group_size(p, kv_head) * p.q_len) return;
  const Row row = make_row(p, b, kv_head, row_index);
  const auto part = [&](int64_t i) { return partial_row<A>(p, plan, workspace, head, i, row_index); };
  Softmax<A> all{-infinity<A>(), 0};
  for (int64_t i = 0; i < plan.split.parts; ++i) all.max = larger(all.max, part(i)[0]);
  const auto weight = [&](int64_t i) { return part(i)[0] == all.max ? A(1) : std::exp(part(i)[0] - all.max); };
  for (int64_t i = 0; i < plan.split.parts; ++i) all.sum += part(i)[1] * weight(i);
  const RowEnd<A> done = end_row(p, row.head, all);
  S* out =
      static_cast<S*>(p.out) + b * p.out_strides.batch + row.head * p.out_strides.head + row.query * p.out_strides.row;
  for (int64_t c = thread_id(); c < p.v_head_dim; c += threads) {
    A value = 0;
    for (int64_t i = 0; i < plan.split.parts; ++i) value += part(i)[2 + c] * weight(i);
    narrow(value * done.factor / done.divisor, out + c);
  }
  if (thread_id() == 0) static_cast<A*>(p.lse)[(b * p.num_heads + row.head) * p.q_len + row.query] = done.lse;
}

}  // namespace attnpack::cuda
