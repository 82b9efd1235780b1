#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/forward_mma.cuh>

// Decode over keys in pages, and over quantised rows.
namespace attnpack::cuda {
namespace {

template <class S, int Width, KeysIn From>
using SourceTile = ForwardTile<S, 1, kDecodeKeyWarps, Width, From>;

template <class S, int Width, KeysIn From>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    decode_source_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan,
                         void* workspace) {
  extern __shared__ __align__(128) unsigned char shared[];
  forward_mma_block<SourceTile<S, Width, From>>(p, plan, workspace, blockIdx.x, shared);
}

template <KeysIn From>
struct SourceKernels {
  template <class S, int Width>
  using Tile = SourceTile<S, Width, From>;
  template <class S, int Width>
  static constexpr MmaKernel* get() {
    return decode_source_kernel<S, Width, From>;
  }
};

}  // namespace

const char* forward_from_source(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                                void* stream) {
  return p.quantized_bits == 8   ? launch_forward<SourceKernels<KeysIn::kBytes8>>(p, plan, workspace, device, stream)
         : p.quantized_bits == 4 ? launch_forward<SourceKernels<KeysIn::kBytes4>>(p, plan, workspace, device, stream)
                                 : launch_forward<SourceKernels<KeysIn::kPages>>(p, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
