#include <torch/library.h>

#include <attnpack/ops/batched/over_samples.h>
#include <attnpack/ops/detail/causal_conv1d_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

CausalConv1dResult causal_conv1d_batched(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args) {
  check_causal_conv1d(x, weight, args);
  return over_samples<CausalConv1dResult>(
      {x, or_undefined(args.initial_state)}, {weight, or_undefined(args.bias)}, args.kv_lens, args.cu_seqlens,
      /*foldable=*/true, [&](const auto& rows, const auto& weights, const auto& lens, const auto& ends) {
        return causal_conv1d_op(rows[0], weights[0],
                                {if_defined(weights[1]), if_defined(rows[1]), lens, ends, args.silu});
      });
}

CausalConv1dGradients causal_conv1d_backward_batched(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                     const Tensor& x, const Tensor& weight,
                                                     const CausalConv1dArguments& args) {
  check_causal_conv1d_backward(grad_out, grad_state, x, weight, args);
  return over_samples<CausalConv1dGradients>(
      {grad_out, or_undefined(grad_state), x, or_undefined(args.initial_state)}, {weight, or_undefined(args.bias)},
      args.kv_lens, args.cu_seqlens, /*foldable=*/false,
      [&](const auto& rows, const auto& weights, const auto& lens, const auto& ends) {
        return causal_conv1d_backward_op(rows[0], if_defined(rows[1]), rows[2], weights[0],
                                         {if_defined(weights[1]), if_defined(rows[3]), lens, ends, args.silu});
      });
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatched, m) {
  m.impl("causal_conv1d", attnpack::from_schema<attnpack::causal_conv1d_batched>);
  m.impl("causal_conv1d_backward", attnpack::from_schema<attnpack::causal_conv1d_backward_batched>);
}
