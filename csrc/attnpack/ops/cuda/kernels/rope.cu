#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/launch.cuh>
#include <attnpack/ops/cuda/kernels/place.cuh>

namespace attnpack::cuda {
namespace {

template <class S, class Table>
__global__ void __launch_bounds__(kRopeThreads) rope_kernel(const __grid_constant__ RopeParams p) {
  rotate_row<S, Table>(p, blockIdx.x);
}

}  // namespace

const char* rope(const RopeParams& p, int device, void* stream) {
  return with_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    const int64_t rows = p.batch * p.num_heads * p.length;
    return p.wide_tables ? launch(rope_kernel<S, double>, rows, kRopeThreads, 0, device, stream, p)
                         : launch(rope_kernel<S, float>, rows, kRopeThreads, 0, device, stream, p);
  });
}

}  // namespace attnpack::cuda
