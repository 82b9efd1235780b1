#pragma once

#include "cuda_emulator.h"
#include "cuda_emulator_sm90.h"
#include "cuda_tiles.h"

#include <attnpack/ops/cuda/kernels/sm90/tile_shape.h>
#include <attnpack/ops/cuda/kernels/sm90/forward_sm90.cuh>
#include <attnpack/ops/cuda/kernels/sm90/key_gradient_sm90.cuh>
#include <attnpack/ops/cuda/kernels/sm90/latent_sm90.cuh>
#include <attnpack/ops/cuda/kernels/sm90/query_gradient_sm90.cuh>

// Runs the kernels of sm90/ on the emulated block, as their launchers do.
namespace attnpack::cuda {

inline TileMap emulated_map(const void* base, const Strides& s, int64_t batch, int64_t heads, int64_t rows,
                            int64_t columns, int box_rows) {
  const TileShape shape = tile_shape(s, batch, heads, rows, columns);
  if (std::find(shape.sizes, shape.sizes + 4, 0) != shape.sizes + 4) std::abort();  // the driver refuses such a map
  TileMap map{static_cast<const char*>(base), {}, {}, box_rows};
  std::copy(shape.sizes, shape.sizes + 4, map.sizes);
  std::copy(shape.steps, shape.steps + 3, map.steps);
  return map;
}
inline TileMap key_map(const AttentionParams& p, int box_rows) {
  return emulated_map(p.key, p.key_strides, p.batch, p.num_kv_heads, p.kv_len, p.head_dim, box_rows);
}
inline TileMap value_map(const AttentionParams& p, int box_rows) {
  return emulated_map(p.value, p.value_strides, p.batch, p.num_kv_heads, p.kv_len, p.v_head_dim, box_rows);
}

template <class S, int Width, int Values, Scores Kind, int Groups = 2>
void run_forward_width(const AttentionParams& p, const ForwardPlan& plan, void* workspace, uint64_t seed) {
  using Tile = WarpgroupForward<S, Width, Values, Kind, Groups>;
  const TileMap keys = key_map(p, Tile::kKeys), values = value_map(p, Tile::kKeys);
  run_tiles<Tile>(
      plan.blocks, shared_bytes(plan.kernel, plan.tile_rows, plan.width), seed,
      [&](int64_t i, void* shared) { forward_sm90_block<Tile>(p, plan, keys, values, workspace, i, shared); });
}
template <class S, Scores Kind>
void run_forward_sm90(const AttentionParams& p, const ForwardPlan& plan, void* workspace, uint64_t seed) {
  if constexpr (Kind == Scores::kPlain)
    if (plan.tile_rows == kSm90MostTileRows) return run_forward_width<S, 64, 64, Kind, 3>(p, plan, workspace, seed);
  plan.width == 64    ? run_forward_width<S, 64, 64, Kind>(p, plan, workspace, seed)
  : plan.width == 128 ? run_forward_width<S, 128, 128, Kind>(p, plan, workspace, seed)
  : plan.width == 192 ? run_forward_width<S, 192, 128, Kind>(p, plan, workspace, seed)
                      : run_forward_width<S, 256, 256, Kind>(p, plan, workspace, seed);
}

inline void run_pack_mask(const AttentionParams& p, const MaskBits& mask, void* workspace, uint64_t seed) {
  run_blocks<char>(mask_blocks(mask), kMaskThreads, seed,
                   [&](int64_t i, void*) { pack_mask_block(p, mask, workspace, i); });
}
inline void run_list_keys(const AttentionParams& p, const MaskBits& mask, const MaskLists& lists, int64_t tile_rows,
                          void* workspace, uint64_t seed) {
  run_blocks<MaskListShared>(count_lists(lists), kMaskThreads, seed, [&](int64_t i, void* shared) {
    list_keys_block(p, mask, lists, tile_rows, workspace, i, *static_cast<MaskListShared*>(shared));
  });
}
inline void run_list_rows(const AttentionParams& p, const MaskBits& mask, const MaskLists& lists, void* workspace,
                          uint64_t seed) {
  run_blocks<MaskListShared>(count_lists(lists), kMaskThreads, seed, [&](int64_t i, void* shared) {
    list_rows_block<kBackwardOwnersSm90>(p, mask, lists, workspace, i, *static_cast<MaskListShared*>(shared));
  });
}
template <class S>
void run_forward_masked_sm90(const AttentionParams& p, const ForwardPlan& plan, void* workspace, uint64_t seed) {
  run_pack_mask(p, plan.mask, workspace, seed);
  run_list_keys(p, plan.mask, plan.lists, plan.tile_rows, workspace, seed);
  run_forward_sm90<S, Scores::kMasked>(p, plan, workspace, seed);
}

template <class S>
void run_latent_sm90(const AttentionParams& p, const ForwardPlan& plan, void* workspace, uint64_t seed) {
  using Tile = WarpgroupLatent<S>;
  const TileMap keys = key_map(p, Tile::kKeys);
  run_tiles<Tile>(plan.blocks, shared_bytes(plan.kernel, plan.tile_rows, plan.width), seed,
                  [&](int64_t i, void* shared) { latent_sm90_block<S>(p, plan, keys, workspace, i, shared); });
}

template <class S, int Width, int Values, Scores Kind>
void run_gradients_sm90(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, uint64_t seed) {
  using Rows = WarpgroupQueryGradient<S, Width, Values, Kind>;
  using Keys = WarpgroupKeyGradient<S, Width, Values, Kind>;
  const AttentionParams& p = bp.forward;
  const TileMap steps_of_keys = key_map(p, Rows::kStep), steps_of_values = value_map(p, Rows::kStep),
                keys = key_map(p, Keys::kOwners), values = value_map(p, Keys::kOwners),
                queries =
                    emulated_map(p.query, p.query_strides, p.batch, p.num_heads, p.q_len, p.head_dim, Keys::kStep),
                outs = emulated_map(bp.grad_out, bp.grad_out_strides, p.batch, p.num_heads, p.q_len, p.v_head_dim,
                                    Keys::kStep);
  run_tiles<Rows>(plan.of_rows.blocks, backward_shared_bytes_sm90(Width), seed, [&](int64_t i, void* shared) {
    query_gradient_sm90_block<S, Width, Values, Kind>(bp, plan, steps_of_keys, steps_of_values, workspace, i, shared);
  });
  run_sums<Gradient::kQuery, S>(bp, plan, workspace, seed);
  run_tiles<Keys>(plan.of_keys.blocks, backward_shared_bytes_sm90(Width), seed, [&](int64_t i, void* shared) {
    key_gradient_sm90_block<S, Width, Values, Kind>(bp, plan, keys, values, queries, outs, workspace, i, shared);
  });
  run_sums<Gradient::kKeyAndValue, S>(bp, plan, workspace, seed);
}
template <class S, Scores Kind>
void run_backward_kind(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, uint64_t seed) {
  plan.width == 64    ? run_gradients_sm90<S, 64, 64, Kind>(bp, plan, workspace, seed)
  : plan.width == 128 ? run_gradients_sm90<S, 128, 128, Kind>(bp, plan, workspace, seed)
                      : run_gradients_sm90<S, 192, 128, Kind>(bp, plan, workspace, seed);
}
template <class S>
void run_backward_sm90(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, uint64_t seed) {
  const AttentionParams& p = bp.forward;
  if (is_plain(p)) return run_backward_kind<S, Scores::kPlain>(bp, plan, workspace, seed);
  if (!is_masked(p)) {
    plan.width == 64 ? run_gradients_sm90<S, 64, 64, Scores::kAny>(bp, plan, workspace, seed)
                     : run_gradients_sm90<S, 128, 128, Scores::kAny>(bp, plan, workspace, seed);
    return;
  }
  run_pack_mask(p, plan.mask, workspace, seed);
  run_list_keys(p, plan.mask, plan.lists_of_rows, kBackwardOwnersSm90, workspace, seed);
  run_list_rows(p, plan.mask, plan.lists_of_keys, workspace, seed);
  run_backward_kind<S, Scores::kMasked>(bp, plan, workspace, seed);
}

}  // namespace attnpack::cuda
