#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/target.h>
#include <attnpack/ops/detail/linear_params.h>
#include <attnpack/ops/linear.h>

namespace attnpack {
namespace {

using at::Tensor;

// More rows read the weight more than once.
constexpr int64_t kFewCudaRows = 2;

// Until a GPU has shown where our kernel is faster than torch's, it runs only on request:
// ATTNPACK_CUDA_LINEAR=attnpack.
bool takes_attnpack_kernel() {
  const char* named = std::getenv("ATTNPACK_CUDA_LINEAR");
  return named && std::strcmp(named, "attnpack") == 0;
}

Tensor linear_cuda(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CudaKernels* kernels = takes_attnpack_kernel() ? cuda_kernels(input.device().index()) : nullptr;
  if (!kernels || !fits_few_rows(input, weight, bias) || input.numel() / input.size(-1) > kFewCudaRows)
    return linear_formula(input, weight, bias);
  const Target target(input);
  const PreparedLinear prepared = prepare_linear(input, weight, bias);
  check_launch(kernels->linear(prepared.params, target.device(), target.stream()));
  return prepared.out;
}

std::vector<Tensor> linears_cuda(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  return each_linear(linear_cuda, input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("linear", attnpack::linear_cuda);
  m.impl("linears", attnpack::linears_cuda);
}
