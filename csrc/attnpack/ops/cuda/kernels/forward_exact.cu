#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/forward_exact.cuh>
#include <attnpack/ops/cuda/kernels/launch.cuh>

namespace attnpack::cuda {
namespace {

// 4 blocks leave a thread 128 registers. Without a number ptxas aimed at 72 for bf16 on sm_80, and spilled 340 bytes.
template <class S, class A>
__global__ void __launch_bounds__(kExactThreads, 4)
    exact_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan, void* workspace) {
  __shared__ ExactShared<A> shared;
  forward_exact_block<S, A>(p, plan, workspace, blockIdx.x, &shared);
}

template <class S, class A>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ForwardPlan plan, void* workspace) {
  __shared__ MergeShared<A> shared;
  merge_parts<S, A>(p, plan, workspace, blockIdx.x, shared);
}

}  // namespace

const char* forward_exact(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                          void* stream) {
  return with_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    return launch(exact_kernel<S, typename Accumulation<S>::type>, plan.blocks, kExactThreads, 0, device, stream, p,
                  plan, workspace);
  });
}

const char* merge_forward(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                          void* stream) {
  return with_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    return launch(merge_kernel<S, typename Accumulation<S>::type>, merge_blocks(p, plan), kMergeThreads, 0, device,
                  stream, p, plan, workspace);
  });
}

}  // namespace attnpack::cuda
