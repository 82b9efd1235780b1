#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/linear.h>

namespace attnpack {

template <typename>
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  static const DispatchedOp<decltype(linear<>)> op("attnpack::linear");
  return op(input, weight, bias);
}

template at::Tensor linear<>(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

std::vector<at::Tensor> linears(const at::Tensor& input, at::TensorList weights, at::TensorList biases) {
  static const DispatchedOp<decltype(linears)> op("attnpack::linears");
  return op(input, weights, biases);
}

std::vector<at::Tensor> each_linear(OneLinear* one, const at::Tensor& input, at::TensorList weights,
                                    at::TensorList biases) {
  ATTNPACK_CHECK(biases.empty() || biases.size() == weights.size(), "biases: got ", biases.size(), ", want none or ",
                 weights.size(), ", one for each weight");
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i < weights.size(); ++i)
    outs.push_back(one(input, weights[i], biases.empty() ? std::nullopt : std::optional(biases[i])));
  return outs;
}

std::vector<at::Tensor> linears_formula(const at::Tensor& input, at::TensorList weights, at::TensorList biases) {
  return each_linear(at::linear, input, weights, biases);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  m.def("linears(Tensor input, Tensor[] weights, Tensor[] biases) -> Tensor[]");
}

// vmap has no rule for lists of results.
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) { m.impl("linears", &attnpack::linears_formula); }
