#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/padded.h>
#include <attnpack/ops/attention_varlen.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/varlen_arguments.h>
#include <attnpack/ops/query_scale.h>

namespace attnpack {

AttentionResult attention_varlen_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  static const DispatchedOp<decltype(attention_varlen_op)> op("attnpack::attention_varlen");
  return op(query, key, value, cu_seqlens_q, args);
}

VarlenGradients attention_varlen_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                             const Tensor& query, const Tensor& key, const Tensor& value,
                                             const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                             const VarlenArguments& args, bool sinks_gradient) {
  static const DispatchedOp<decltype(attention_varlen_backward_op)> op("attnpack::attention_varlen_backward");
  return op(grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, args, sinks_gradient);
}

AttentionResult attention_varlen_with_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const Tensor& cu_seqlens_q, const VarlenOptions& o) {
  check_dense("query", query);
  check_dense("key", key);
  check_dense("value", value);
  check_dense("cu_seqlens_q", cu_seqlens_q);
  if (o.cu_seqlens_k()) check_dense("cu_seqlens_k", *o.cu_seqlens_k());
  if (o.block_table()) check_dense("block_table", *o.block_table());
  if (o.kv_lens()) check_dense("kv_lens", *o.kv_lens());
  VarlenArguments args{o.rules()};
  args.cu_seqlens_k = o.cu_seqlens_k();
  args.max_seqlen_q = o.max_seqlen_q();
  args.max_seqlen_k = o.max_seqlen_k();
  args.block_table = o.block_table();
  args.kv_lens = o.kv_lens();
  args.dropout_seed = dropout_seed(o.dropout_p(), query.device());
  if (const auto* number = std::get_if<int64_t>(&o.q_offset())) args.q_offset = *number;
  if (const auto* tensor = std::get_if<Tensor>(&o.q_offset())) args.q_offsets = *tensor;
  return attention_varlen_op(scale_queries(query, o.query_scale()), key, value, cu_seqlens_q, args);
}

Tensor attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                        const VarlenOptions& options) {
  return std::get<0>(attention_varlen_with_lse(query, key, value, cu_seqlens_q, options));
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, " ATTNPACK_VARLEN_SCHEMA
        ") -> (Tensor, Tensor)");
  m.def(
      "attention_varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor "
      "out, Tensor lse, Tensor cu_seqlens_q, " ATTNPACK_VARLEN_SCHEMA
      ", bool sinks_gradient=False) -> (Tensor, Tensor, Tensor, Tensor)");
}
