#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/launch.cuh>
#include <attnpack/ops/cuda/kernels/quantize.cuh>

namespace attnpack::cuda {
namespace {

template <class S>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_kernel(const __grid_constant__ QuantizeParams p, RowsTo to, int64_t rows) {
  __shared__ QuantizeShared shared;
  quantize_block<S>(p, to, rows, blockIdx.x, shared);
}

}  // namespace

const char* quantize(const QuantizeParams& p, RowsTo to, int64_t rows, int device, void* stream) {
  return with_storage(p.dtype, [&](auto storage) {
    return launch(quantize_kernel<decltype(storage)>, (rows + kQuantizeWarps - 1) / kQuantizeWarps, kQuantizeThreads, 0,
                  device, stream, p, to, rows);
  });
}

}  // namespace attnpack::cuda
