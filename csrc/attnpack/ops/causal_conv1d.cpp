#include <attnpack/ops/causal_conv1d.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/core/padded.h>
#include <attnpack/ops/detail/causal_conv1d_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {

CausalConv1dResult causal_conv1d_op(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args) {
  static const DispatchedOp<decltype(causal_conv1d_op)> op("attnpack::causal_conv1d");
  return op(x, weight, args);
}

CausalConv1dGradients causal_conv1d_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                const Tensor& x, const Tensor& weight,
                                                const CausalConv1dArguments& args) {
  static const DispatchedOp<decltype(causal_conv1d_backward_op)> op("attnpack::causal_conv1d_backward");
  return op(grad_out, grad_state, x, weight, args);
}

std::tuple<Tensor, Tensor> causal_conv1d_with_state(const Tensor& x, const Tensor& weight,
                                                    const CausalConv1dOptions& o) {
  check_dense("x", x);
  check_dense("weight", weight);
  ATTNPACK_CHECK(!o.activation() || *o.activation() == "silu", "activation: got '", o.activation().value_or(""),
                 "', want 'silu', or none");
  const auto dense = [](const char* name, const std::optional<Tensor>& given) {
    if (given) check_dense(name, *given);
    return given;
  };
  return causal_conv1d_op(
      x, weight,
      {dense("bias", o.bias()), dense("initial_state", o.initial_state()), dense("kv_lens", o.kv_lens()),
       dense("cu_seqlens", o.cu_seqlens()), o.activation().has_value()});
}

Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const CausalConv1dOptions& options) {
  return std::get<0>(causal_conv1d_with_state(x, weight, options));
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("causal_conv1d(Tensor x, Tensor weight, " ATTNPACK_CAUSAL_CONV1D_SCHEMA ") -> (Tensor, Tensor)");
  m.def(
      "causal_conv1d_backward(Tensor grad_out, Tensor? grad_state, Tensor x, Tensor "
      "weight, " ATTNPACK_CAUSAL_CONV1D_SCHEMA ") -> (Tensor, Tensor, Tensor, Tensor)");
}
