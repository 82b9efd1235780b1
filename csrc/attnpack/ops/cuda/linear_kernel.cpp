#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/target.h>
#include <attnpack/ops/detail/linear_params.h>
#include <attnpack/ops/linear.h>

namespace attnpack {
namespace {

using at::Tensor;

Tensor linear_cuda(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CudaKernels* kernels = cuda_kernels(input.device().index());
  if (!kernels || !fits_few_rows(input, weight, bias)) return linear_formula(input, weight, bias);
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
