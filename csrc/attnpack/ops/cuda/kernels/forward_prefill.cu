#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/forward_mma.cuh>

namespace attnpack::cuda {
namespace {

constexpr int kRowWarps = 4, kKeyWarps = 1;

template <class S, int Width, Scores Kind>
__global__ void __launch_bounds__(kWarp * kRowWarps * kKeyWarps)
    prefill_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,
                   void* workspace) {
  extern __shared__ __align__(128) unsigned char shared[];
  forward_mma_block<S, kRowWarps, kKeyWarps, Width, KeysIn::kTensor, Kind>(p, plan, workspace, blockIdx.x, shared);
}

template <Scores Kind>
struct PrefillKernels {
  template <class S, int Width>
  static constexpr MmaKernel* get() {
    return prefill_kernel<S, Width, Kind>;
  }
};

template <Scores Kind>
const char* launch_kind(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device, void* stream) {
  return launch_forward<PrefillKernels<Kind>, kRowWarps, kKeyWarps, KeysIn::kTensor, Kind>(p, plan, workspace, device,
                                                                                           stream);
}

}  // namespace

const char* forward_prefill(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                            void* stream) {
  return is_plain(p) ? launch_kind<Scores::kPlain>(p, plan, workspace, device, stream)
                     : launch_kind<Scores::kAny>(p, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
