#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/sm90/latent_sm90.cuh>
#include <attnpack/ops/cuda/kernels/sm90/tile_map.cuh>

namespace attnpack::cuda {
namespace {

template <class S>
__global__ void __launch_bounds__(WarpgroupLatent<S>::kThreads, 1)
    latent_sm90_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,
                       const __grid_constant__ TileMap key_map, void* workspace) {
  extern __shared__ __align__(1024) unsigned char shared[];
  latent_sm90_block<S>(p, plan, key_map, workspace, blockIdx.x, shared);
}

}  // namespace

const char* latent_sm90(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device, void* stream) {
  return with_half_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    using Tile = WarpgroupLatent<S>;
    TileMap map;
    const char* error = make_tile_map(
        map, p.dtype, p.key, tile_shape(p.key_strides, p.batch, p.num_kv_heads, p.kv_len, p.head_dim), Tile::kKeys);
    return error ? error
                 : launch(latent_sm90_kernel<S>, plan.blocks, Tile::kThreads, sizeof(typename Tile::Shared), device,
                          stream, p, plan, map, workspace);
  });
}

}  // namespace attnpack::cuda
