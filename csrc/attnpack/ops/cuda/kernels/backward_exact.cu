#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/backward_exact.cuh>
#include <attnpack/ops/cuda/kernels/launch.cuh>

namespace attnpack::cuda {
namespace {

template <Gradient Of, class S, class A>
__global__ void __launch_bounds__(kBackwardThreads)
    gradient_kernel(const __grid_constant__ AttentionBackwardParams bp, int64_t most_group) {
  __shared__ ExactShared<A> shared;
  backward_block<Of, S, A>(bp, most_group, blockIdx.x, &shared);
}

template <Gradient Of>
const char* launch_gradient(const AttentionBackwardParams& bp, int64_t most_group, int device, void* stream) {
  return with_storage(bp.forward.dtype, [&](auto storage) {
    using S = decltype(storage);
    return launch(gradient_kernel<Of, S, typename Accumulation<S>::type>, backward_blocks(bp.forward, Of, most_group),
                  kBackwardThreads, 0, device, stream, bp, most_group);
  });
}

}  // namespace

const char* backward_exact(const AttentionBackwardParams& bp, int64_t most_group, int device, void* stream) {
  const char* error = launch_gradient<Gradient::kQuery>(bp, most_group, device, stream);
  if (!error) error = launch_gradient<Gradient::kKey>(bp, most_group, device, stream);
  if (!error) error = launch_gradient<Gradient::kValue>(bp, most_group, device, stream);
  return error;
}

}  // namespace attnpack::cuda
