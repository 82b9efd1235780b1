#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/forward_mma.cuh>

namespace attnpack::cuda {
namespace {

template <class S, int Width>
using DecodeTile = ForwardTile<S, 1, kDecodeKeyWarps, Width>;

template <class S, int Width>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    decode_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,
                  void* workspace) {
  extern __shared__ __align__(128) unsigned char shared[];
  forward_mma_block<DecodeTile<S, Width>>(p, plan, workspace, blockIdx.x, shared);
}

struct DecodeKernels {
  template <class S, int Width>
  using Tile = DecodeTile<S, Width>;
  template <class S, int Width>
  static constexpr MmaKernel* get() {
    return decode_kernel<S, Width>;
  }
};

}  // namespace

const char* forward_decode(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                           void* stream) {
  return launch_forward<DecodeKernels>(p, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
