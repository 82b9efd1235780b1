#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

LinearAttentionResult linear_attention_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const LinearAttentionArguments& args) {
  check_linear_attention(query, key, value, args);
  return {empty_laid_as(query, linear_out_shape(query, value), query.options()),
          at::empty_symint(linear_state_shape(query, value, args), query.options().dtype(accumulation_type(query)))};
}

Tensor linear_attention_in_place_meta(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state,
                                      const OwnedStateArguments& args) {
  check_linear_attention_in_place(query, key, value, state, args);
  return empty_laid_as(query, linear_out_shape(query, value), query.options());
}

LinearAttentionGradients linear_attention_backward_meta(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                        const Tensor& query, const Tensor& key, const Tensor& value,
                                                        const LinearAttentionArguments& args) {
  check_linear_attention_backward(grad_out, grad_state, query, key, value, args);
  const auto like = [&](const std::optional<Tensor>& x) {
    return x ? at::empty_symint(x->sym_sizes(), x->options()) : at::empty({0}, query.options());
  };
  return {empty_laid_as(query), empty_laid_as(key), empty_laid_as(value),
          like(args.log_decay), like(args.beta),    like(args.initial_state)};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("linear_attention", attnpack::from_schema<attnpack::linear_attention_meta>);
  m.impl("linear_attention_", attnpack::from_schema<attnpack::linear_attention_in_place_meta>);
  m.impl("linear_attention_backward", attnpack::from_schema<attnpack::linear_attention_backward_meta>);
}
