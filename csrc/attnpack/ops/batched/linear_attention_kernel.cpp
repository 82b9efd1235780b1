#include <torch/library.h>

#include <attnpack/ops/batched/over_samples.h>
#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

LinearAttentionArguments with_tensors(const LinearAttentionArguments& args, const std::vector<Tensor>& x, size_t first,
                                      const std::optional<Tensor>& lens, const std::optional<Tensor>& ends) {
  return {if_defined(x[first]), if_defined(x[first + 1]), if_defined(x[first + 2]), lens, ends, args.scale};
}

LinearAttentionResult linear_attention_batched(const Tensor& query, const Tensor& key, const Tensor& value,
                                               const LinearAttentionArguments& args) {
  check_linear_attention(query, key, value, args);
  return over_samples<LinearAttentionResult>(
      {query, key, value, or_undefined(args.log_decay), or_undefined(args.beta), or_undefined(args.initial_state)}, {},
      args.kv_lens, args.cu_seqlens, /*foldable=*/true,
      [&](const std::vector<Tensor>& x, const auto&, const auto& lens, const auto& ends) {
        return linear_attention_op(x[0], x[1], x[2], with_tensors(args, x, 3, lens, ends));
      });
}

LinearAttentionGradients linear_attention_backward_batched(const Tensor& grad_out,
                                                           const std::optional<Tensor>& grad_state, const Tensor& query,
                                                           const Tensor& key, const Tensor& value,
                                                           const LinearAttentionArguments& args) {
  check_linear_attention_backward(grad_out, grad_state, query, key, value, args);
  return over_samples<LinearAttentionGradients>(
      {grad_out, or_undefined(grad_state), query, key, value, or_undefined(args.log_decay), or_undefined(args.beta),
       or_undefined(args.initial_state)},
      {}, args.kv_lens, args.cu_seqlens, /*foldable=*/true,
      [&](const std::vector<Tensor>& x, const auto&, const auto& lens, const auto& ends) {
        return linear_attention_backward_op(x[0], if_defined(x[1]), x[2], x[3], x[4],
                                            with_tensors(args, x, 5, lens, ends));
      });
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatched, m) {
  m.impl("linear_attention", attnpack::from_schema<attnpack::linear_attention_batched>);
  m.impl("linear_attention_backward", attnpack::from_schema<attnpack::linear_attention_backward_batched>);
}
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) {
  m.impl("linear_attention_", attnpack::from_schema<attnpack::linear_attention_by_copy>);
}
