#include <atomic>

#include <attnpack/ops/cuda/kernels/table.h>

namespace attnpack {
namespace {

std::atomic<const CudaKernels*> table{nullptr};

}  // namespace

void set_cuda_kernels(const CudaKernels* kernels) { table = kernels; }

const CudaKernels* cuda_kernels(int device) {
  const CudaKernels* kernels = table;
  return kernels && kernels->usable(device) ? kernels : nullptr;
}

}  // namespace attnpack
