#pragma once

#include <attnpack/ops/cuda/kernels/device.cuh>
#include <attnpack/ops/cuda/kernels/score.cuh>

// Products by plain multiply-adds in the accumulation type, for calls that the tensor cores cannot take: fp32 and fp64
// without rounding to 16 bits, and any head_dim. A block has 16 owners (rows or keys). Each owner sums
// weight[owner][other] * x[other] over all others, 32 at a time.
namespace attnpack::cuda {

constexpr int kOwners = 16, kOthers = kWarp, kDepth = 32;

template <class A>
struct ExactShared {
  A owner[kOwners][kDepth + 1], other[kOthers][kDepth + 1], weight[kOwners][kOthers + 1];
  A factor[kOwners], max[kOwners], sum[kOwners];
  Row rows[kOthers];
};

// Rows of a [B, H, L, width] tensor. KeyRows: the keys of a kv head from `begin` on. QueryRows: the query rows in a
// table.
template <class S>
struct KeyRows {
  const S* base;
  int64_t stride;
  ATTNPACK_HD const S* operator()(int64_t i) const { return base + i * stride; }
};
template <class S>
ATTNPACK_HD inline KeyRows<S> key_rows(const void* base, const Strides& s, int64_t b, int64_t kv_head, int64_t begin) {
  return {static_cast<const S*>(base) + b * s.batch + kv_head * s.head + begin * s.row, s.row};
}
template <class S>
struct QueryRows {
  const S* base;
  int64_t head, row;
  const Row* rows;
  ATTNPACK_HD const S* operator()(int64_t i) const { return base + rows[i].head * head + rows[i].query * row; }
};
template <class S>
ATTNPACK_HD inline QueryRows<S> query_rows(const void* base, const Strides& s, int64_t b, const Row* rows) {
  return {static_cast<const S*>(base) + b * s.batch, s.head, s.row, rows};
}

// Fills a table with `count` rows from `first` on. Afterwards every thread of the block sees the table.
ATTNPACK_DEVICE void fill_rows(const AttentionParams& p, int64_t sequence, int64_t kv_head, int64_t first,
                               int64_t count, Row* rows) {
  sync_block();
  if (thread_id() < count) rows[thread_id()] = make_row(p, sequence, kv_head, first + thread_id());
  sync_block();
}

// The share of a thread: the owners kOwnersPerThread * warp + i, and the other of its lane.
template <int Threads>
struct ThreadShare {
  static constexpr int kOwnersPerThread = kOwners * kWarp / Threads;
  ATTNPACK_DEVICE static int lane() { return thread_id() % kWarp; }
  ATTNPACK_DEVICE static int owner(int i) { return thread_id() / kWarp * kOwnersPerThread + i; }
};

// sum[i] = owner i . other of this lane.
template <int Threads, class A, class Owners, class Others>
ATTNPACK_DEVICE void dot_products(ExactShared<A>& shared, const Owners& owners, int64_t num_owners,
                                  const Others& others, int64_t num_others, int64_t depth,
                                  A (&sum)[ThreadShare<Threads>::kOwnersPerThread]) {
  using Share = ThreadShare<Threads>;
#pragma unroll
  for (int i = 0; i < Share::kOwnersPerThread; ++i) sum[i] = 0;
  for (int64_t begin = 0; begin < depth; begin += kDepth) {
    sync_block();
    for (int i = thread_id(); i < (kOwners + kOthers) * kDepth; i += Threads) {
      const int d = i % kDepth, r = i / kDepth;
      const bool there = begin + d < depth;
      if (r < kOwners)
        shared.owner[r][d] = there && r < num_owners ? widen(owners(r)[begin + d]) : A(0);
      else
        shared.other[r - kOwners][d] = there && r - kOwners < num_others ? widen(others(r - kOwners)[begin + d]) : A(0);
    }
    sync_block();
#pragma unroll 4
    for (int d = 0; d < kDepth; ++d) {
      const A x = shared.other[Share::lane()][d];
#pragma unroll
      for (int i = 0; i < Share::kOwnersPerThread; ++i) sum[i] += shared.owner[Share::owner(i)][d] * x;
    }
  }
}

// sum[o] += weight[o][j] * others(j)[column] over all j, without excluded pairs. The weights must be in shared memory.
template <class A, class Others>
ATTNPACK_DEVICE void add_weighted(const ExactShared<A>& shared, const Others& others, int count, int64_t column,
                                  int64_t width, A (&sum)[kOwners]) {
  for (int j = 0; j < count; ++j) {
    const A x = column < width ? widen(others(j)[column]) : A(0);
#pragma unroll
    for (int o = 0; o < kOwners; ++o) {
      const A weight = shared.weight[o][j];
      sum[o] += weight * (marks_excluded(weight) ? A(0) : x);
    }
  }
}

}  // namespace attnpack::cuda
