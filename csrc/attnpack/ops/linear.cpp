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

void check_linear_shapes(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  ATTNPACK_CHECK(weight.dim() == 2, "weight has shape ", weight.sym_sizes(), ", wants [out, in]");
  ATTNPACK_CHECK(input.dim() >= 1 && input.sym_size(-1) == weight.sym_size(1), "input has shape ", input.sym_sizes(),
                 ", wants [..., ", weight.sym_size(1), "] as weight is ", weight.sym_sizes());
  ATTNPACK_CHECK(!bias || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)), "bias has shape ",
                 bias->sym_sizes(), ", wants [", weight.sym_size(0), "] as weight is ", weight.sym_sizes());
  const auto device = input.device();
  ATTNPACK_CHECK(weight.device() == device && (!bias || bias->device() == device), "input is on ", device,
                 ", weight on ", weight.device(), ", bias on ", bias ? bias->device() : weight.device(),
                 ": move them to one device");
}

at::Tensor linear_formula(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  check_linear_shapes(input, weight, bias);
  const auto dtype = input.scalar_type();
  ATTNPACK_CHECK(at::isFloatingType(dtype), "input has dtype ", dtype, ", wants a float dtype: call .float() on it");
  ATTNPACK_CHECK(weight.scalar_type() == dtype && (!bias || bias->scalar_type() == dtype), "input has dtype ", dtype,
                 ", weight ", weight.scalar_type(), ", bias ", bias ? bias->scalar_type() : weight.scalar_type(),
                 ": cast them to one with .to()");
  return at::linear(input, weight, bias);
}

std::vector<at::Tensor> linears_formula(const at::Tensor& input, at::TensorList weights, at::TensorList biases) {
  return each_linear(linear_formula, input, weights, biases);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  m.def("linears(Tensor input, Tensor[] weights, Tensor[] biases) -> Tensor[]");
}
