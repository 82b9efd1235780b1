#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/forward_mma.cuh>

namespace attnpack::cuda {
namespace {

template <class S, int Width, Scores Kind>
__global__ void __launch_bounds__(PrefillTile<S, Width, Kind>::kThreads)
    prefill_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,
                   void* workspace) {
  extern __shared__ __align__(128) unsigned char shared[];
  forward_mma_block<PrefillTile<S, Width, Kind>>(p, plan, workspace, blockIdx.x, shared);
}

template <Scores Kind>
struct PrefillKernels {
  template <class S, int Width>
  using Tile = PrefillTile<S, Width, Kind>;
  template <class S, int Width>
  static constexpr MmaKernel* get() {
    return prefill_kernel<S, Width, Kind>;
  }
};

}  // namespace

const char* forward_prefill(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                            void* stream) {
  return is_plain(p) ? launch_forward<PrefillKernels<Scores::kPlain>>(p, plan, workspace, device, stream)
                     : launch_forward<PrefillKernels<Scores::kAny>>(p, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
