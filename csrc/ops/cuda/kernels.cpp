#include <atomic>

#include <attnpack/ops/cuda/kernels.h>

namespace attnpack {
namespace {

std::atomic<const CudaKernels*> table{nullptr};

}  // namespace

void set_cuda_kernels(const CudaKernels* kernels) { table = kernels && kernels->usable() ? kernels : nullptr; }

const CudaKernels* cuda_kernels() { return table; }

}  // namespace attnpack
