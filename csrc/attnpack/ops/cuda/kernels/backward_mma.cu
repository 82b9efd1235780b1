#include <type_traits>

#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/backward_mma.cuh>
#include <attnpack/ops/cuda/kernels/launch.cuh>

namespace attnpack::cuda {
namespace {

template <class S, Gradient Of, int Width>
__global__ void __launch_bounds__(BackwardTile<S, Of, Width>::kThreads, Width <= 128 ? 2 : 1)
    gradient_mma_kernel(const __grid_constant__ AttentionBackwardParams bp, const __grid_constant__ BackwardPlan plan,
                        void* workspace) {
  extern __shared__ __align__(128) unsigned char shared[];
  backward_mma_block<S, Of, Width>(bp, plan, workspace, blockIdx.x, shared);
}

template <class S, Gradient Of, int Width>
const char* launch_gradient(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, int device,
                            void* stream) {
  using Tile = BackwardTile<S, Of, Width>;
  return launch(gradient_mma_kernel<S, Of, Width>, plan.of(Of).blocks, Tile::kThreads, sizeof(typename Tile::Shared),
                device, stream, bp, plan, workspace);
}

// If registers hold both sums, the gradients of keys and values are computed together, and P is formed once for both.
template <class S, int Width>
const char* launch_gradients(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, int device,
                             void* stream) {
  const char* error = launch_gradient<S, Gradient::kQuery, Width>(bp, plan, workspace, device, stream);
  if (!error) error = sum_query_gradient(bp, plan, workspace, device, stream);
  if constexpr (Width <= 128) {
    if (!error) error = launch_gradient<S, Gradient::kKeyAndValue, Width>(bp, plan, workspace, device, stream);
  } else {
    if (!error) error = launch_gradient<S, Gradient::kKey, Width>(bp, plan, workspace, device, stream);
    if (!error) error = launch_gradient<S, Gradient::kValue, Width>(bp, plan, workspace, device, stream);
  }
  if (!error) error = sum_key_gradient(bp, plan, workspace, device, stream);
  return error;
}

}  // namespace

const char* backward_mma(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, int device,
                         void* stream) {
  return with_half_storage(bp.forward.dtype, [&](auto storage) {
    using S = decltype(storage);
    return plan.width == 64    ? launch_gradients<S, 64>(bp, plan, workspace, device, stream)
           : plan.width == 128 ? launch_gradients<S, 128>(bp, plan, workspace, device, stream)
                               : launch_gradients<S, 256>(bp, plan, workspace, device, stream);
  });
}

}  // namespace attnpack::cuda
