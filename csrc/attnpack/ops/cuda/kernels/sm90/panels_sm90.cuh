#pragma once

#include <attnpack/ops/cuda/kernels/key_source.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>
#include <attnpack/ops/cuda/kernels/sm90/device_sm90.cuh>
#include <attnpack/ops/cuda/kernels/tiles.cuh>

// Tiles of panels (device_sm90.cuh), and the fragments that a warpgroup holds of them.
namespace attnpack::cuda {

template <int Rows>
ATTNPACK_HD constexpr int panel_offset(int row, int chunk) {
  return chunk / 8 * Rows * kPanel + swizzled_offset(row, chunk % 8, kPanel);
}
// The operand from row `first` on, as 16 rows of contiguous numbers per column block: k-th 16 columns, or k-th 16 rows.
template <int Rows>
struct Panels {
  const void* tile;
  ATTNPACK_DEVICE SharedMatrix whole(int first = 0) const {
    return shared_matrix(static_cast<const char*>(tile) + first * kPanel * 2, Rows * kPanel * 2);
  }
  ATTNPACK_DEVICE static constexpr int columns(int k) { return k / 4 * Rows * kPanel * 2 + k % 4 * 32; }
  ATTNPACK_DEVICE static constexpr int rows(int k) { return 16 * k * kPanel * 2; }
};

// Begins s [64, 8 Blocks] = A B^T. A and B: rows of tiles from a_first and b_first on. RegistersShort: a loop is not to
// keep the places of A's columns.
template <class S, int ARows, int BRows, int Width, bool RegistersShort = false, int Blocks>
ATTNPACK_DEVICE void begin_scores(float (&s)[Blocks][4], const S* a, int a_first, const S* b, int b_first = 0) {
  SharedMatrix left = Panels<ARows>{a}.whole(a_first);
  const SharedMatrix right = Panels<BRows>{b}.whole(b_first);
  if constexpr (RegistersShort) hold(left);
  hold(s);
  fence_products();
#pragma unroll
  for (int k = 0; k < Width / 16; ++k)
    multiply_rows<S>(s, left.further(Panels<ARows>::columns(k)), right.further(Panels<BRows>::columns(k)), k > 0);
  commit_products();
}
// Begins sum [64, Width] += weights [64, BRows] B.
template <class S, int BRows, int Blocks>
ATTNPACK_DEVICE void begin_sum(float (&sum)[Blocks][4], uint32_t (&weights)[BRows / 16][4], const S* b) {
  const SharedMatrix right = Panels<BRows>{b}.whole();
  hold(sum);
  hold(weights);
  fence_products();
#pragma unroll
  for (int k = 0; k < BRows / 16; ++k) multiply_columns<S>(sum, weights[k], right.further(Panels<BRows>::rows(k)));
  commit_products();
}

// As begin_sum, with weights [64, BRows] in a tile.
template <class S, int ARows, int BRows, int Blocks>
ATTNPACK_DEVICE void begin_sum_of_shared(float (&sum)[Blocks][4], const S* weights, const S* b) {
  const SharedMatrix left = Panels<ARows>{weights}.whole(), right = Panels<BRows>{b}.whole();
  hold(sum);
  fence_products();
#pragma unroll
  for (int k = 0; k < BRows / 16; ++k)
    multiply_shared_columns<S>(sum, left.further(Panels<ARows>::columns(k)), right.further(Panels<BRows>::rows(k)));
  commit_products();
}

// The fragments C of two blocks are a fragment A.
template <class S, int Blocks>
ATTNPACK_DEVICE void pack_weights(const float (&s)[Blocks][4], uint32_t (&to)[Blocks / 2][4]) {
#pragma unroll
  for (int k = 0; k < Blocks / 2; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[k][i] = pack<S>(s[2 * k + i / 2][2 * (i % 2)], s[2 * k + i / 2][2 * (i % 2) + 1]);
}

template <int Blocks>
ATTNPACK_DEVICE void clear(float (&sum)[Blocks][4]) {
#pragma unroll
  for (int j = 0; j < Blocks; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[j][i] = 0;
}

// Copies rows [0, count) of `width` numbers into a tile [Rows, Width]. The rest of the tile becomes zeros.
template <int Rows, int Width, int Threads, class S, class GetRow>
ATTNPACK_DEVICE void copy_panels(S* tile, const GetRow& row, int count, int64_t width, const S* somewhere) {
  constexpr int kChunks = Width / 8;
  for (int n = thread_id(); n < Rows * kChunks; n += Threads) {
    const int r = n / kChunks, chunk = n % kChunks;
    const bool valid = r < count && chunk * 8 < width;
    copy_async(tile + panel_offset<Rows>(r, chunk), valid ? row(r) + chunk * 8 : somewhere, valid ? 16 : 0);
  }
}

// Sets rows [first, Rows) of a tile to 0.
template <int Rows, int Width, int Threads, class S>
ATTNPACK_DEVICE void clear_rows(S* tile, int first) {
  constexpr int kChunks = Width / 8;
  const uint32_t zeros[4] = {};
  for (int n = first * kChunks + thread_id(); n < Rows * kChunks; n += Threads)
    store_chunk(tile + panel_offset<Rows>(n / kChunks, n % kChunks), zeros);
}

// Copies boxes [first, first + Rows) of a head to a tile.
template <int Rows, int Width, class S>
ATTNPACK_DEVICE void copy_boxes(S* tile, const TileMap& map, Barrier& there, int first, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < Width / kPanel; ++panel)
    copy_box(tile + panel * Rows * kPanel, map, there, panel * kPanel, first, head, batch);
}
// A dimension without a step has size 1 in the map.
ATTNPACK_DEVICE int place_in_map(int64_t stride, int64_t i) { return stride ? static_cast<int>(i) : 0; }

// Whether any thread of the block found it so. found: in shared memory, false before. Not by any_in_block: its threads
// would wait at different places.
constexpr int kAllThreads = 8;  // the number of their barrier
template <int Warps>
ATTNPACK_DEVICE bool any_in_all(bool broken, bool (&found)[Warps]) {
  sync_warp();
  if (ballot(broken) && thread_id() % kWarp == 0) found[thread_id() / kWarp] = true;
  sync_threads(kAllThreads, Warps * kWarp);
  bool any = false;
  for (const bool each : found) any |= each;
  return any;
}

// Runs a block of workers and of the warpgroup after them, which copies for them: load(turn) and work(turn). work
// returns whether this thread wrote NaN or Inf; if any did, both run a second time, where the operands are cleaned.
template <int Workers, int Warps, class Load, class Work>
ATTNPACK_DEVICE void run_roles(bool (&broken)[Warps], const Load& load, const Work& work) {
  constexpr bool kThree = Workers == 3 * kWarpgroup;  // a multiprocessor has 512 registers for a thread of each
  if (thread_id() >= Workers) {
    release_registers<kThree ? 32 : 24>();
    load(0);
    if (any_in_all(false, broken)) load(1);
  } else {
    take_registers<kThree ? 160 : 240>();
    if (any_in_all(work(0), broken)) work(1);
  }
}

struct alignas(8) Pair {
  float first, second;
};
// Writes factor * (a lane's numbers of one row), and returns whether one of them is NaN or Inf. row(d): where column
// 8 d + 2 (lane % 4) of the row is.
template <class S, int Blocks>
ATTNPACK_DEVICE bool write_lane_row(const float (&sum)[Blocks][4], int h, float factor, S* row, int64_t width) {
  bool broken = false;
  S* to = row + thread_id() % 4 * 2;
#pragma unroll
  for (int d = 0; d < Blocks; ++d)
    if (8 * d < width) {
      const float x = sum[d][2 * h] * factor, y = sum[d][2 * h + 1] * factor;
      broken |= !is_finite(x) || !is_finite(y);
      if constexpr (sizeof(S) == 2)
        *reinterpret_cast<uint32_t*>(to + 8 * d) = pack<S>(x, y);
      else
        *reinterpret_cast<Pair*>(to + 8 * d) = {x, y};
    }
  return broken;
}
// Writes a lane's numbers of one row of the output, from column `first` on, as write_row in partial.cuh does.
template <class S, int Blocks>
ATTNPACK_DEVICE bool write_lane_result(const AttentionParams& p, const ForwardPlan& plan, void* workspace,
                                       const Unit& u, int64_t index, const Row& row, Softmax<float> state,
                                       const float (&sum)[Blocks][4], int h, int first) {
  const bool writes_state = thread_id() % 4 == 0 && first == 0;
  const int64_t width = p.v_head_dim - first;
  if (plan.parts > 1) {
    float* to = partial_row<float>(p, plan, workspace, u, index);
    if (writes_state) *reinterpret_cast<Pair*>(to) = {state.max, state.sum};
    return write_lane_row(sum, h, 1.f, to + 2 + first, width);
  }
  const RowEnd<float> done = end_row(p, row.head, state);
  if (writes_state) static_cast<float*>(p.lse)[(u.b * p.num_heads + row.head) * p.q_len + row.query] = done.lse;
  S* to = static_cast<S*>(p.out) + u.b * p.out_strides.batch + row.head * p.out_strides.head +
          row.query * p.out_strides.row;
  return write_lane_row(sum, h, done.factor / done.divisor, to + first, width);
}
// Writes rows of `out` after it has added the NaN and Inf of the keys that they see (write_tile in partial.cuh).
template <class S>
ATTNPACK_DEVICE bool write_broken(const AttentionParams& p, const ForwardPlan& plan, void* workspace, const Unit& u,
                                  int count, int threads, const Row* rows, float* out, int stride, const float* max,
                                  const float* sum) {
  add_broken(out, stride, {thread_id() / kWarp, threads / kWarp, count, static_cast<int>(p.v_head_dim)}, u.keys,
             NumberOfRows<PlainRows<S>>{plain_rows<S>(p.value, p.value_strides, u)}, RowSeesKey{&p, u.b, rows});
  return write_tile<S>(
      p, plan, workspace, u, count, rows, threads, [&](int r) { return Softmax<float>{max[r], sum[r]}; },
      [&](int r) { return [&, r](int64_t c) { return out[r * stride + c]; }; });
}
// Puts a warpgroup's fragments into a table of rows in shared memory. first: the warp's first row.
template <int Stride, int Blocks>
ATTNPACK_DEVICE void put_fragments(float* table, const float (&sum)[Blocks][4], int first, float factor = 1) {
  const int lane = thread_id() % kWarp;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int d = 0; d < Blocks; ++d)
      store_pair(table + (first + lane / 4 + 8 * h) * Stride + 8 * d + lane % 4 * 2, sum[d][2 * h] * factor,
                 sum[d][2 * h + 1] * factor);
}

}  // namespace attnpack::cuda
