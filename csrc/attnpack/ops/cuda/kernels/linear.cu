#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/launch.cuh>
#include <attnpack/ops/cuda/kernels/linear.cuh>

namespace attnpack::cuda {
namespace {

template <class S>
__global__ void __launch_bounds__(kLinearThreads) linear_kernel(const __grid_constant__ LinearParams p) {
  linear_block<S>(p, blockIdx.x);
}

}  // namespace

const char* linear(const LinearParams& p, int device, void* stream) {
  const auto launch_for = [&](auto storage) {
    constexpr int64_t kOutputs = kLinearThreads / kWarp;
    return launch(linear_kernel<decltype(storage)>, (p.outputs + kOutputs - 1) / kOutputs, kLinearThreads, 0, device,
                  stream, p);
  };
  return p.dtype == DType::kFloat32 ? launch_for(float{}) : with_half_storage(p.dtype, launch_for);
}

}  // namespace attnpack::cuda
