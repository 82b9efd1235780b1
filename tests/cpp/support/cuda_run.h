#pragma once

#include "cuda_emulator.h"
#include "cuda_run_sm90.h"
#include "cuda_tiles.h"

#include <attnpack/ops/cuda/kernels/backward_exact.cuh>
#include <attnpack/ops/cuda/kernels/backward_mma.cuh>
#include <attnpack/ops/cuda/kernels/forward_exact.cuh>
#include <attnpack/ops/cuda/kernels/forward_latent.cuh>
#include <attnpack/ops/cuda/kernels/forward_mma.cuh>

// Include catch.h first, or define CHECK.
//
// Runs the kernels that a plan names on the emulated block, as the launchers of the .cu files do.
namespace attnpack::cuda {

template <class Tile>
void run_mma(const AttentionParams& p, const ForwardPlan& plan, void* workspace, uint64_t seed) {
  const int64_t room = p.quantized_bits ? quantized_shared_bytes(p.quantized_bits, plan.width)
                                        : shared_bytes(plan.kernel, plan.tile_rows, plan.width);
  run_tiles<Tile>(plan.blocks, room, seed,
                  [&](int64_t i, void* shared) { forward_mma_block<Tile>(p, plan, workspace, i, shared); });
}
template <class S, KeysIn From = KeysIn::kTensor>
void run_decode(const AttentionParams& p, const ForwardPlan& plan, void* workspace, uint64_t seed) {
  plan.width == 64    ? run_mma<ForwardTile<S, 1, 4, 64, From>>(p, plan, workspace, seed)
  : plan.width == 128 ? run_mma<ForwardTile<S, 1, 4, 128, From>>(p, plan, workspace, seed)
                      : run_mma<ForwardTile<S, 1, 4, 256, From>>(p, plan, workspace, seed);
}
template <class S, Scores Kind>
void run_prefill(const AttentionParams& p, const ForwardPlan& plan, void* workspace, uint64_t seed) {
  plan.width == 64    ? run_mma<PrefillTile<S, 64, Kind>>(p, plan, workspace, seed)
  : plan.width == 128 ? run_mma<PrefillTile<S, 128, Kind>>(p, plan, workspace, seed)
                      : run_mma<PrefillTile<S, 256, Kind>>(p, plan, workspace, seed);
}
template <class S, int RowTiles, int Warps>
void run_latent(const AttentionParams& p, const ForwardPlan& plan, void* workspace, uint64_t seed) {
  run_tiles<LatentTile<S, RowTiles, Warps>>(
      plan.blocks, shared_bytes(plan.kernel, plan.tile_rows, plan.width), seed,
      [&](int64_t i, void* shared) { forward_latent_block<S, RowTiles, Warps>(p, plan, workspace, i, shared); });
}

template <class S>
void run_forward(const AttentionParams& p, const ForwardPlan& plan, void* workspace, uint64_t seed) {
  using A = typename Accumulation<S>::type;
  if constexpr (sizeof(S) == 2) {
    if (p.block_table && plan.kernel == ForwardKernel::kDecode)
      run_decode<S, KeysIn::kPages>(p, plan, workspace, seed);
    else if (p.quantized_bits == 8)
      run_decode<S, KeysIn::kBytes8>(p, plan, workspace, seed);
    else if (p.quantized_bits == 4)
      run_decode<S, KeysIn::kBytes4>(p, plan, workspace, seed);
    else if (plan.kernel == ForwardKernel::kLatent)
      plan.tile_rows == 16 ? run_latent<S, 1, 4>(p, plan, workspace, seed)
                           : run_latent<S, 4, 8>(p, plan, workspace, seed);
    else if (plan.kernel == ForwardKernel::kDecode)
      run_decode<S>(p, plan, workspace, seed);
    else if (plan.kernel == ForwardKernel::kLatentSm90)
      run_latent_sm90<S>(p, plan, workspace, seed);
    else if (plan.kernel == ForwardKernel::kSm90)
      is_plain(p)    ? run_forward_sm90<S, Scores::kPlain>(p, plan, workspace, seed)
      : is_masked(p) ? run_forward_masked_sm90<S>(p, plan, workspace, seed)
                     : run_forward_sm90<S, Scores::kAny>(p, plan, workspace, seed);
    else if (plan.kernel == ForwardKernel::kPrefill)
      is_plain(p) ? run_prefill<S, Scores::kPlain>(p, plan, workspace, seed)
                  : run_prefill<S, Scores::kAny>(p, plan, workspace, seed);
  }
  if (plan.kernel == ForwardKernel::kExact)
    run_blocks<ExactShared<A>>(plan.blocks, kExactThreads, seed, [&](int64_t i, void* shared) {
      forward_exact_block<S, A>(p, plan, workspace, i, shared);
    });
  if (plan.parts > 1) run_merge<S>(p, plan, workspace, seed);
}
template <class S>
void run_forward_guarded(const AttentionParams& p, const ForwardPlan& plan, uint64_t seed) {
  Guarded workspace(plan.workspace_bytes);
  std::memset(workspace.data(), 0xff, workspace.bytes());
  run_forward<S>(p, plan, workspace.data(), seed);
}

template <Gradient Of, class S>
void run_gradient_exactly(const AttentionBackwardParams& bp, int64_t most_group, uint64_t seed) {
  using A = typename Accumulation<S>::type;
  run_blocks<ExactShared<A>>(backward_blocks(bp.forward, Of, most_group), kBackwardThreads, seed,
                             [&](int64_t i, void* shared) { backward_block<Of, S, A>(bp, most_group, i, shared); });
}
template <Gradient Of, int Width, class S>
void run_gradient(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, uint64_t seed) {
  run_tiles<BackwardTile<S, Of, Width>>(
      plan.of(Of).blocks, backward_shared_bytes(Width), seed,
      [&](int64_t i, void* shared) { backward_mma_block<S, Of, Width>(bp, plan, workspace, i, shared); });
}
template <int Width, class S>
void run_gradients(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, uint64_t seed) {
  run_gradient<Gradient::kQuery, Width, S>(bp, plan, workspace, seed);
  run_sums<Gradient::kQuery, S>(bp, plan, workspace, seed);
  if constexpr (Width <= 128) {
    run_gradient<Gradient::kKeyAndValue, Width, S>(bp, plan, workspace, seed);
  } else {
    run_gradient<Gradient::kKey, Width, S>(bp, plan, workspace, seed);
    run_gradient<Gradient::kValue, Width, S>(bp, plan, workspace, seed);
  }
  run_sums<Gradient::kKeyAndValue, S>(bp, plan, workspace, seed);
}
template <class S>
void run_backward(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, uint64_t seed) {
  if constexpr (sizeof(S) == 2) {
    if (plan.sm90) return run_backward_sm90<S>(bp, plan, workspace, seed);
    if (plan.width == 64) return run_gradients<64, S>(bp, plan, workspace, seed);
    if (plan.width == 128) return run_gradients<128, S>(bp, plan, workspace, seed);
    if (plan.width == 256) return run_gradients<256, S>(bp, plan, workspace, seed);
  }
  run_gradient_exactly<Gradient::kQuery, S>(bp, plan.most_group, seed);
  run_gradient_exactly<Gradient::kKey, S>(bp, plan.most_group, seed);
  run_gradient_exactly<Gradient::kValue, S>(bp, plan.most_group, seed);
}
template <class S>
void run_backward_guarded(const AttentionBackwardParams& bp, const BackwardPlan& plan, uint64_t seed) {
  Guarded workspace(plan.workspace_bytes);
  std::memset(workspace.data(), 0xff, workspace.bytes());
  run_backward<S>(bp, plan, workspace.data(), seed);
}

}  // namespace attnpack::cuda
