#pragma once

#include "cuda_emulator.h"

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

}  // namespace attnpack::cuda
