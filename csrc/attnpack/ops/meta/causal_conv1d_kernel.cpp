#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/detail/causal_conv1d_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

CausalConv1dResult causal_conv1d_meta(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args) {
  check_causal_conv1d(x, weight, args);
  return {empty_rows_as(x), empty_conv_state(conv_state_shape(x, weight, args), x.options())};
}

CausalConv1dGradients causal_conv1d_backward_meta(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                  const Tensor& x, const Tensor& weight,
                                                  const CausalConv1dArguments& args) {
  check_causal_conv1d_backward(grad_out, grad_state, x, weight, args);
  const auto none = [&] { return at::empty({0}, x.options()); };
  return {
      empty_rows_as(x), at::empty_symint(weight.sym_sizes(), weight.options()),
      args.bias ? at::empty_symint(args.bias->sym_sizes(), args.bias->options()) : none(),
      args.initial_state ? empty_conv_state(args.initial_state->sym_sizes(), args.initial_state->options()) : none()};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("causal_conv1d", attnpack::from_schema<attnpack::causal_conv1d_meta>);
  m.impl("causal_conv1d_backward", attnpack::from_schema<attnpack::causal_conv1d_backward_meta>);
}
