#pragma once

#include <attnpack/ops/cuda/kernels/exact.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>

namespace attnpack::cuda {

// Attends 16 rows from `first` on to the unit's keys, for columns [column, column + Threads) of the values.
template <class S, class A, int Threads>
ATTNPACK_DEVICE void attend_exactly(const AttentionParams& p, const ForwardPlan& plan, void* workspace, const Unit& u,
                                    int64_t first, int64_t column, ExactShared<A>& shared) {
  using Share = ThreadShare<Threads>;
  const int64_t left = count_head_rows(p, u.sequence, u.kv_head) - first;
  const int count = static_cast<int>(left < kOwners ? left : kOwners);
  fill_rows(p, u.sequence, u.kv_head, first, kOwners, shared.rows);
  const auto queries = query_rows<S>(p.query, p.query_strides, u.b, shared.rows);

  Softmax<A> state[Share::kOwnersPerThread];
  A values[kOwners];
#pragma unroll
  for (int i = 0; i < Share::kOwnersPerThread; ++i) state[i] = {-infinity<A>(), 0};
#pragma unroll
  for (int o = 0; o < kOwners; ++o) values[o] = 0;

  for (int64_t begin = u.keys.begin; begin < u.keys.end; begin += kOthers) {
    const int keys = static_cast<int>(u.keys.end - begin < kOthers ? u.keys.end - begin : kOthers);
    A s[Share::kOwnersPerThread];
    const int64_t place = u.first_key + begin;
    dot_products<Threads>(shared, queries, count, key_rows<S>(p.key, p.key_strides, u.b, u.kv_head, place), keys,
                          p.head_dim, s);
    sync_block();  // the weights of the last step have been read, even if head_dim is 0
#pragma unroll
    for (int i = 0; i < Share::kOwnersPerThread; ++i) {
      const Row& row = shared.rows[Share::owner(i)];
      const int64_t key = begin + Share::lane();
      const A score = Share::lane() < keys ? finish_score(p, u.b, row, key, s[i]) : -infinity<A>();
      const A top = larger(state[i].max, warp_max(score));
      const A factor = top == state[i].max ? A(1) : std::exp(state[i].max - top);
      const bool excluded = score == -infinity<A>();
      A weight = excluded ? A(-0.0) : std::exp(score - top);
      state[i] = {top, state[i].sum * factor + warp_sum(weight)};
      if (p.dropout_p > 0 && !excluded) weight *= dropout_factor<A>(p, u.b, row, key);
      shared.weight[Share::owner(i)][Share::lane()] = weight;
      if (Share::lane() == 0) shared.factor[Share::owner(i)] = factor;
    }
    sync_block();
#pragma unroll
    for (int o = 0; o < kOwners; ++o)
      if (shared.factor[o] != 1) values[o] *= shared.factor[o];
    add_weighted(shared, key_rows<S>(p.value, p.value_strides, u.b, u.kv_head, place), keys, column + thread_id(),
                 p.v_head_dim, values);
  }

#pragma unroll
  for (int i = 0; i < Share::kOwnersPerThread; ++i)
    if (Share::lane() == 0) {
      shared.max[Share::owner(i)] = state[i].max;
      shared.sum[Share::owner(i)] = state[i].sum;
    }
  sync_block();
  const int64_t thread_column = column + thread_id();
#pragma unroll
  for (int o = 0; o < kOwners; ++o)
    if (o < count)
      write_row<S, A>(p, plan, workspace, u, first + o, shared.rows[o], {shared.max[o], shared.sum[o]}, thread_column,
                      p.v_head_dim < thread_column + 1 ? p.v_head_dim : thread_column + 1, 1, thread_column == 0,
                      [&](int64_t) { return values[o]; });
}

constexpr int kExactThreads = kExactColumns;

template <class S, class A>
ATTNPACK_DEVICE void forward_exact_block(const AttentionParams& p, const ForwardPlan& plan, void* workspace,
                                         int64_t block, void* shared) {
  const Unit u = unit_of(p, plan, block / plan.column_blocks);
  if (u.first >= count_head_rows(p, u.sequence, u.kv_head)) return;
  attend_exactly<S, A, kExactThreads>(p, plan, workspace, u, u.first, block % plan.column_blocks * kExactThreads,
                                      *static_cast<ExactShared<A>*>(shared));
}

}  // namespace attnpack::cuda
