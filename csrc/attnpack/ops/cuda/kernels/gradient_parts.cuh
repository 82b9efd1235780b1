#pragma once

#include <attnpack/ops/cuda/kernels/device.cuh>
#include <attnpack/ops/cuda/kernels/score.cuh>

// Gradients of few owners: a tile's others are cut into parts, so that all multiprocessors have work. Each block leaves
// the sums of its part, and a kernel adds up the parts in their order. So the bits are the same each time.
namespace attnpack::cuda {

// The others of a part: whole steps, counted from `first`, which is not after the others' beginning.
ATTNPACK_HD inline Range others_of_part(const Range& others, int64_t first, int64_t step, int64_t parts, int64_t part) {
  if (parts == 1) return others;
  const int64_t each = ((others.end - first + step - 1) / step + parts - 1) / parts * step;
  return intersection(others, {first + part * each, first + (part + 1) * each});
}

// Where a block leaves the sums of its owners.
struct PartialRows {
  float* base;
  int64_t columns;
  ATTNPACK_HD float* operator()(int owner) const { return base + owner * columns; }
};
// first: the first owner of them, of all sequences. column: the first one, head_dim for dV.
ATTNPACK_HD inline PartialRows partial_rows(const AttentionParams& p, const BackwardPlan& plan, Gradient of,
                                            void* workspace, const HeadPlace& at, int64_t part, int64_t first,
                                            int64_t column = 0) {
  const GradientPlan& gradient = plan.of(of);
  const int64_t head = int64_t{at.batch} * p.num_kv_heads + at.kv_head, columns = gradient_columns(p, of);
  const int64_t owner = (head * gradient.parts + part) * gradient.owners + first;
  return {static_cast<float*>(workspace) + owner * columns + column, columns};
}
ATTNPACK_HD inline PartialRows partial_rows(const AttentionParams& p, const BackwardPlan& plan, Gradient of,
                                            void* workspace, const OwnersPlace& at, int64_t column = 0) {
  const int64_t before = of == Gradient::kQuery ? queries_of(p, at.sequence).begin * group_size(p, at.kv_head)
                                                : keys_of(p, at.sequence).begin;
  return partial_rows(p, plan, of, workspace, {at.batch, at.kv_head}, at.part, before + at.first, column);
}

// A warp adds up the parts of one owner.
constexpr int kSumWarps = 4, kSumThreads = kWarp * kSumWarps;
ATTNPACK_HD inline int64_t sum_blocks_of_head(const GradientPlan& plan) {
  return (plan.owners + kSumWarps - 1) / kSumWarps;
}
template <Gradient Of, class S>
ATTNPACK_DEVICE void sum_gradient_parts(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace,
                                        int64_t block) {
  const AttentionParams& p = bp.forward;
  const GradientPlan& gradient = plan.of(Of);
  const int32_t of_head = static_cast<int32_t>(sum_blocks_of_head(gradient));
  const HeadPlace head = place_of_head(static_cast<int32_t>(block) / of_head, p.num_kv_heads);
  const int64_t owner = static_cast<int64_t>(static_cast<int32_t>(block) % of_head) * kSumWarps + thread_id() / kWarp;
  const auto row_of = [&](void* base, const Strides& strides, int64_t of, int64_t row) {
    return static_cast<S*>(base) + head.batch * strides.batch + of * strides.head + row * strides.row;
  };
  S *first, *second = nullptr;
  if constexpr (Of == Gradient::kQuery) {
    const int64_t group = group_size(p, head.kv_head);
    if (owner >= group * p.q_len) return;
    first = row_of(bp.grad_query, bp.grad_query_strides, group_head(p, head.kv_head, owner % group), owner / group);
  } else {
    if (owner >= p.kv_len) return;
    first = row_of(bp.grad_key, bp.grad_key_strides, head.kv_head, owner);
    second = row_of(bp.grad_value, bp.grad_value_strides, head.kv_head, owner);
  }
  const PartialRows parts = partial_rows(p, plan, Of, workspace, head, 0, owner);
  const int64_t further = gradient.owners * parts.columns;
  for (int64_t c = thread_id() % kWarp; c < parts.columns; c += kWarp) {
    float sum = parts.base[c];
#pragma unroll 4
    for (int64_t i = 1; i < gradient.parts; ++i) sum += parts.base[i * further + c];
    narrow(sum, c < p.head_dim ? first + c : second + (c - p.head_dim));
  }
}

}  // namespace attnpack::cuda
