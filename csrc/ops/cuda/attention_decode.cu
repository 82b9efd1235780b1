#include <attnpack/ops/cuda/launchers.h>
#include <attnpack/ops/cuda/forward_mma.cuh>
#include <attnpack/ops/cuda/launch.cuh>

namespace attnpack::cuda {
namespace {

constexpr int kRowWarps = 1, kKeyWarps = 4;

template <class S, int Width>
__global__ void __launch_bounds__(kWarp * kRowWarps * kKeyWarps, 2)
    decode_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,
                  void* workspace) {
  extern __shared__ __align__(128) unsigned char shared[];
  forward_mma_block<S, kRowWarps, kKeyWarps, Width>(p, plan, workspace, blockIdx.x, shared);
}

template <class S, int Width>
const char* launch_width(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device, void* stream) {
  using Tile = ForwardTile<S, kRowWarps, kKeyWarps, Width>;
  return launch(decode_kernel<S, Width>, plan.blocks, Tile::kThreads, sizeof(typename Tile::Shared), device, stream, p,
                plan, workspace);
}

}  // namespace

const char* forward_decode(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                           void* stream) {
  return with_half_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    return plan.width == 64    ? launch_width<S, 64>(p, plan, workspace, device, stream)
           : plan.width == 128 ? launch_width<S, 128>(p, plan, workspace, device, stream)
                               : launch_width<S, 256>(p, plan, workspace, device, stream);
  });
}

}  // namespace attnpack::cuda
