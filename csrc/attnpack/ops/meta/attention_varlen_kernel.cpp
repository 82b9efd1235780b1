#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/varlen_arguments.h>

namespace attnpack {
namespace {

AttentionResult attention_varlen_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  check_attention_varlen(query, key, value, cu_seqlens_q, args);
  const c10::SymInt tokens = query.sym_size(0), num_heads = query.sym_size(1);
  return {at::empty_symint({tokens, num_heads, value.sym_size(-1)}, query.options()),
          at::empty_symint({num_heads, tokens}, query.options().dtype(accumulation_type(query.scalar_type())))};
}

VarlenGradients attention_varlen_backward_meta(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                               const Tensor& query, const Tensor& key, const Tensor& value,
                                               const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                               const VarlenArguments& args, bool sinks_gradient) {
  check_attention_varlen_backward(grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, args, sinks_gradient);
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {like(query), like(key), like(value), sinks_gradient ? like(*args.sinks) : at::empty({0}, query.options())};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("attention_varlen", attnpack::from_schema<attnpack::attention_varlen_meta>);
  m.impl("attention_varlen_backward", attnpack::from_schema<attnpack::attention_varlen_backward_meta>);
}
