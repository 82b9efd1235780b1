#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

AttentionResult attention_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                               const AttentionArguments& args) {
  check_attention(query, key, value, args);
  const c10::SymInt batch = query.sym_size(0), num_heads = query.sym_size(1), q_len = query.sym_size(2);
  return {empty_laid_as(query, {batch, num_heads, q_len, value.sym_size(3)}, query.options()),
          at::empty_symint({batch, num_heads, q_len}, query.options().dtype(accumulation_type(query.scalar_type())))};
}

AttentionGradients attention_backward_meta(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                           const Tensor& query, const Tensor& key, const Tensor& value,
                                           const Tensor& out, const Tensor& lse, const AttentionArguments& args,
                                           bool mask_gradient, bool sinks_gradient) {
  check_attention_backward(grad_out, grad_lse, query, key, value, out, lse, args, mask_gradient, sinks_gradient);
  const auto none = [&] { return at::empty({0}, query.options()); };
  return {empty_laid_as(query), empty_laid_as(key), empty_laid_as(value),
          mask_gradient ? at::empty_symint(args.mask->sym_sizes(), args.mask->options()) : none(),
          sinks_gradient ? at::empty_symint(args.sinks->sym_sizes(), args.sinks->options()) : none()};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("attention", attnpack::from_schema<attnpack::attention_meta>);
  m.impl("attention_backward", attnpack::from_schema<attnpack::attention_backward_meta>);
}
