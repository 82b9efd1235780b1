#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/forward_latent.cuh>
#include <attnpack/ops/cuda/kernels/launch.cuh>

namespace attnpack::cuda {
namespace {

template <class S, int RowTiles, int Warps>
__global__ void __launch_bounds__(kWarp* Warps)
    latent_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,
                  void* workspace) {
  extern __shared__ __align__(128) unsigned char shared[];
  forward_latent_block<S, RowTiles, Warps>(p, plan, workspace, blockIdx.x, shared);
}

template <class S, int RowTiles, int Warps>
const char* launch_rows(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device, void* stream) {
  using Tile = LatentTile<S, RowTiles, Warps>;
  return launch(latent_kernel<S, RowTiles, Warps>, plan.blocks, Tile::kThreads, sizeof(typename Tile::Shared), device,
                stream, p, plan, workspace);
}

}  // namespace

const char* forward_latent(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                           void* stream) {
  return with_half_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    return plan.tile_rows == kDecodeTileRows ? launch_rows<S, 1, 4>(p, plan, workspace, device, stream)
                                             : launch_rows<S, 4, 8>(p, plan, workspace, device, stream);
  });
}

}  // namespace attnpack::cuda
