#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/append.cuh>
#include <attnpack/ops/cuda/kernels/launch.cuh>

namespace attnpack::cuda {
namespace {

__global__ void __launch_bounds__(kAppendThreads) append_kernel(const __grid_constant__ AppendParams p) {
  append_block(p, blockIdx.x);
}

}  // namespace

const char* append(const AppendParams& p, int device, void* stream) {
  return launch(append_kernel, p.batch * p.num_kv_heads * p.new_positions, kAppendThreads, 0, device, stream, p);
}

}  // namespace attnpack::cuda
