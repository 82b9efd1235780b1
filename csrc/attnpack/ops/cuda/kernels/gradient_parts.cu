#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/gradient_parts.cuh>
#include <attnpack/ops/cuda/kernels/launch.cuh>

namespace attnpack::cuda {
namespace {

template <Gradient Of, class S>
__global__ void __launch_bounds__(kSumThreads)
    sum_gradient_kernel(const __grid_constant__ AttentionBackwardParams bp, const __grid_constant__ BackwardPlan plan,
                        void* workspace) {
  sum_gradient_parts<Of, S>(bp, plan, workspace, blockIdx.x);
}

template <Gradient Of>
const char* sum_gradient(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, int device,
                         void* stream) {
  if (plan.of(Of).parts == 1) return nullptr;
  const int64_t blocks = bp.forward.batch * bp.forward.num_kv_heads * sum_blocks_of_head(plan.of(Of));
  return with_half_storage(bp.forward.dtype, [&](auto storage) {
    return launch(sum_gradient_kernel<Of, decltype(storage)>, blocks, kSumThreads, 0, device, stream, bp, plan,
                  workspace);
  });
}

}  // namespace

const char* sum_query_gradient(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, int device,
                               void* stream) {
  return sum_gradient<Gradient::kQuery>(bp, plan, workspace, device, stream);
}
const char* sum_key_gradient(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, int device,
                             void* stream) {
  return sum_gradient<Gradient::kKeyAndValue>(bp, plan, workspace, device, stream);
}

}  // namespace attnpack::cuda
