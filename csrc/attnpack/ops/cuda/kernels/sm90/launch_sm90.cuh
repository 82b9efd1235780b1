#pragma once

#include <attnpack/ops/cuda/kernels/sm90/forward_sm90.cuh>
#include <attnpack/ops/cuda/kernels/sm90/tile_map.cuh>

namespace attnpack::cuda {

template <class S, int Width, int Values, Scores Kind, int Groups = 2>
__global__ void __launch_bounds__(WarpgroupForward<S, Width, Values, Kind, Groups>::kThreads, 1)
    forward_sm90_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,
                        const __grid_constant__ TileMap key_map, const __grid_constant__ TileMap value_map,
                        void* workspace) {
  extern __shared__ __align__(1024) unsigned char shared[];
  forward_sm90_block<WarpgroupForward<S, Width, Values, Kind, Groups>>(p, plan, key_map, value_map, workspace,
                                                                       blockIdx.x, shared);
}

template <class S, int Width, int Values, Scores Kind, int Groups = 2>
const char* launch_width(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device, void* stream) {
  using Tile = WarpgroupForward<S, Width, Values, Kind, Groups>;
  TileMap key_map, value_map;
  const auto make = [&](TileMap& map, const void* base, const Strides& strides, int64_t width) {
    return make_tile_map(map, p.dtype, base, tile_shape(strides, p.batch, p.num_kv_heads, p.kv_len, width),
                         Tile::kKeys);
  };
  if (const char* error = make(key_map, p.key, p.key_strides, p.head_dim)) return error;
  if (const char* error = make(value_map, p.value, p.value_strides, p.v_head_dim)) return error;
  return launch(forward_sm90_kernel<S, Width, Values, Kind, Groups>, plan.blocks, Tile::kThreads,
                sizeof(typename Tile::Shared), device, stream, p, plan, key_map, value_map, workspace);
}

template <Scores Kind>
const char* launch_forward_sm90(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                                void* stream) {
  return with_half_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    if constexpr (Kind == Scores::kPlain)
      if (plan.tile_rows == kSm90MostTileRows)
        return launch_width<S, 64, 64, Kind, 3>(p, plan, workspace, device, stream);
    return plan.width == 64    ? launch_width<S, 64, 64, Kind>(p, plan, workspace, device, stream)
           : plan.width == 128 ? launch_width<S, 128, 128, Kind>(p, plan, workspace, device, stream)
           : plan.width == 192 ? launch_width<S, 192, 128, Kind>(p, plan, workspace, device, stream)
                               : launch_width<S, 256, 256, Kind>(p, plan, workspace, device, stream);
  });
}

}  // namespace attnpack::cuda
