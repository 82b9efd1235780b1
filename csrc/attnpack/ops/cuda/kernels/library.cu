#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/launch.cuh>

namespace attnpack::cuda {
namespace {

// The tensor-core kernels need cp.async, ldmatrix and mma.m16n8k16, which came with sm_80.
bool usable(int device) {
  int driver = 0, runtime = 0, major = 0;
  return cudaDriverGetVersion(&driver) == cudaSuccess && cudaRuntimeGetVersion(&runtime) == cudaSuccess &&
         driver / 1000 >= runtime / 1000 &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8;
}

Device describe_device(int device) {
  int count = 1, shared = 48 * 1024;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return {count, shared};
}

ForwardPlan plan(const AttentionParams& p, int64_t most_group, int device) {
  return plan_forward(p, most_group, describe_device(device));
}

const char* forward(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device, void* stream) {
  const auto launch_kernel = plan.kernel == ForwardKernel::kPrefill  ? forward_prefill
                             : plan.kernel == ForwardKernel::kDecode ? forward_decode
                             : plan.kernel == ForwardKernel::kLatent ? forward_latent
                                                                     : forward_exact;
  const char* error = launch_kernel(p, plan, workspace, device, stream);
  if (!error && plan.split.parts > 1) error = merge_forward(p, plan, workspace, device, stream);
  return error;
}

const char* backward(const AttentionBackwardParams& bp, int64_t most_group, int device, void* stream) {
  const BackwardPlan plan = plan_backward(bp, most_group, describe_device(device));
  return plan.width > 0 ? backward_mma(bp, plan, device, stream) : backward_exact(bp, most_group, device, stream);
}

constexpr CudaKernels kTable{usable, plan, forward, backward, append, rope, linear};
[[maybe_unused]] const bool registered = (set_cuda_kernels(&kTable), true);

}  // namespace
}  // namespace attnpack::cuda
