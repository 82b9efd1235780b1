#pragma once

#include "cuda_emulator.h"

#include <attnpack/ops/cuda/kernels/gradient_parts.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>

// Include catch.h first, or define CHECK.
//
// Runs the blocks of a launch on the emulated block. No instruction may meet a bank twice.
namespace attnpack::cuda {

template <class Tile, class Body>
void run_tiles(int64_t blocks, int64_t room, uint64_t seed, const Body& body) {
  CHECK(static_cast<int64_t>(sizeof(typename Tile::Shared)) <= room);
  const int conflicts = run_blocks<typename Tile::Shared>(blocks, Tile::kThreads, seed, body);
  CHECK(conflicts == 1);
}

template <class S>
void run_merge(const AttentionParams& p, const ForwardPlan& plan, void* workspace, uint64_t seed) {
  using A = typename Accumulation<S>::type;
  run_blocks<MergeShared<A>>(merge_blocks(p, plan), kMergeThreads, seed, [&](int64_t i, void* shared) {
    merge_parts<S, A>(p, plan, workspace, i, *static_cast<MergeShared<A>*>(shared));
  });
}

template <Gradient Of, class S>
void run_sums(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, uint64_t seed) {
  if (plan.of(Of).parts == 1) return;
  run_blocks<char>(bp.forward.batch * bp.forward.num_kv_heads * sum_blocks_of_head(plan.of(Of)), kSumThreads, seed,
                   [&](int64_t i, void*) { sum_gradient_parts<Of, S>(bp, plan, workspace, i); });
}

}  // namespace attnpack::cuda
