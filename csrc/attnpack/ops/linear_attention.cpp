#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/core/padded.h>
#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/linear_attention.h>

namespace attnpack {

LinearAttentionResult linear_attention_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const LinearAttentionArguments& args) {
  static const DispatchedOp<decltype(linear_attention_op)> op("attnpack::linear_attention");
  return op(query, key, value, args);
}

LinearAttentionGradients linear_attention_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                      const Tensor& query, const Tensor& key, const Tensor& value,
                                                      const LinearAttentionArguments& args) {
  static const DispatchedOp<decltype(linear_attention_backward_op)> op("attnpack::linear_attention_backward");
  return op(grad_out, grad_state, query, key, value, args);
}

std::tuple<Tensor, Tensor> linear_attention_with_state(const Tensor& query, const Tensor& key, const Tensor& value,
                                                       const RecurrenceOptions& o) {
  check_dense("query", query);
  check_dense("key", key);
  check_dense("value", value);
  const auto dense = [](const char* name, const std::optional<Tensor>& x) {
    if (x) check_dense(name, *x);
    return x;
  };
  return linear_attention_op(
      query, key, value,
      {dense("log_decay", o.log_decay()), dense("beta", o.beta()), dense("initial_state", o.initial_state()),
       dense("kv_lens", o.kv_lens()), dense("cu_seqlens", o.cu_seqlens()), o.scale()});
}

Tensor linear_attention_in_place_op(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state,
                                    const OwnedStateArguments& args) {
  static const DispatchedOp<decltype(linear_attention_in_place_op)> op("attnpack::linear_attention_");
  return op(query, key, value, state, args);
}

Tensor linear_attention_(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state,
                         const RecurrenceOptions& o) {
  ATTNPACK_CHECK(!o.initial_state(), "initial_state: got one, but linear_attention_ reads the states from state");
  check_dense("query", query);
  check_dense("key", key);
  check_dense("value", value);
  return linear_attention_in_place_op(query, key, value, state,
                                      {o.log_decay(), o.beta(), o.kv_lens(), o.cu_seqlens(), o.scale()});
}

Tensor linear_attention(const Tensor& query, const Tensor& key, const Tensor& value, const RecurrenceOptions& options) {
  return std::get<0>(linear_attention_with_state(query, key, value, options));
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("linear_attention(Tensor query, Tensor key, Tensor value, " ATTNPACK_LINEAR_ATTENTION_SCHEMA
        ") -> (Tensor, Tensor)");
  m.def("linear_attention_(Tensor query, Tensor key, Tensor value, Tensor(a!) state, " ATTNPACK_OWNED_STATE_SCHEMA
        ") -> Tensor");
  m.def(
      "linear_attention_backward(Tensor grad_out, Tensor? grad_state, Tensor query, Tensor key, Tensor "
      "value, " ATTNPACK_LINEAR_ATTENTION_SCHEMA ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}
