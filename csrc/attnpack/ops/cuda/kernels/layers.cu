#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/append.cuh>
#include <attnpack/ops/cuda/kernels/launch.cuh>
#include <attnpack/ops/cuda/kernels/linear.cuh>
#include <attnpack/ops/cuda/kernels/rope.cuh>

namespace attnpack::cuda {
namespace {

__global__ void __launch_bounds__(kAppendThreads) append_kernel(const __grid_constant__ AppendParams p) {
  append_block(p, blockIdx.x);
}

template <class S, class Table>
__global__ void __launch_bounds__(kRopeThreads) rope_kernel(const __grid_constant__ RopeParams p) {
  rotate_row<S, Table>(p, blockIdx.x);
}

template <class S>
__global__ void __launch_bounds__(kLinearThreads) linear_kernel(const __grid_constant__ LinearParams p) {
  linear_block<S>(p, blockIdx.x);
}

}  // namespace

const char* append(const AppendParams& p, int device, void* stream) {
  return launch(append_kernel, p.batch * p.num_kv_heads * p.new_positions, kAppendThreads, 0, device, stream, p);
}

const char* rope(const RopeParams& p, int device, void* stream) {
  return with_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    const int64_t rows = p.batch * p.num_heads * p.length;
    return p.wide_tables ? launch(rope_kernel<S, double>, rows, kRopeThreads, 0, device, stream, p)
                         : launch(rope_kernel<S, float>, rows, kRopeThreads, 0, device, stream, p);
  });
}

const char* linear(const LinearParams& p, int device, void* stream) {
  const auto run = [&](auto storage) {
    constexpr int64_t kOutputs = kLinearThreads / kWarp;
    return launch(linear_kernel<decltype(storage)>, (p.outputs + kOutputs - 1) / kOutputs, kLinearThreads, 0, device,
                  stream, p);
  };
  return p.dtype == DType::kFloat32 ? run(float{}) : with_half_storage(p.dtype, run);
}

}  // namespace attnpack::cuda
