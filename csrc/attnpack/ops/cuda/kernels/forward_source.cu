#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/forward_mma.cuh>

// Decode over keys in pages, and over quantised rows.
namespace attnpack::cuda {
namespace {

template <class S, int Width, KeysIn From>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    decode_source_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,
                         void* workspace) {
  extern __shared__ __align__(128) unsigned char shared[];
  forward_mma_block<S, 1, kDecodeKeyWarps, Width, From>(p, plan, workspace, blockIdx.x, shared);
}

template <KeysIn From>
struct SourceKernels {
  template <class S, int Width>
  static constexpr MmaKernel* get() {
    return decode_source_kernel<S, Width, From>;
  }
};

template <KeysIn From>
const char* launch_from(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device, void* stream) {
  return launch_forward<SourceKernels<From>, 1, kDecodeKeyWarps, From>(p, plan, workspace, device, stream);
}

}  // namespace

const char* forward_from_source(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                                void* stream) {
  return p.quantized_bits == 8   ? launch_from<KeysIn::kBytes8>(p, plan, workspace, device, stream)
         : p.quantized_bits == 4 ? launch_from<KeysIn::kBytes4>(p, plan, workspace, device, stream)
                                 : launch_from<KeysIn::kPages>(p, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
