#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/padded.h>
#include <attnpack/ops/attention.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/query_scale.h>

namespace attnpack {

std::optional<Tensor> dropout_seed(double dropout_p, const c10::Device& device) {
  if (dropout_p <= 0) return std::nullopt;
  const c10::Device where = device.is_cuda() ? device : c10::Device(c10::kCPU);
  return at::randint(std::numeric_limits<int64_t>::max(), {1}, at::TensorOptions(at::kLong).device(where));
}

AttentionResult attention_op(const Tensor& query, const Tensor& key, const Tensor& value,
                             const AttentionArguments& args) {
  static const DispatchedOp<decltype(attention_op)> op("attnpack::attention");
  return op(query, key, value, args);
}

AttentionGradients attention_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                         const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                                         const Tensor& lse, const AttentionArguments& args, bool mask_gradient,
                                         bool sinks_gradient) {
  static const DispatchedOp<decltype(attention_backward_op)> op("attnpack::attention_backward");
  return op(grad_out, grad_lse, query, key, value, out, lse, args, mask_gradient, sinks_gradient);
}

namespace {

// kv_lens as the operator uses them: clamped to the range. On the CPU they stay as they are, because the operator
// refuses lengths out of range.
Tensor clamped(const Tensor& kv_lens, const c10::SymInt& kv_len) {
  return kv_lens.is_cpu() ? kv_lens : kv_lens.clamp(0, kv_len.guard_int(__FILE__, __LINE__));
}

// Makes the op's arguments from the options: "end" becomes numbers, and dropout draws its seed.
AttentionArguments make_arguments(const Tensor& query, const Tensor& key, const AttentionOptions& o) {
  check_dense("query", query);
  check_dense("key", key);
  if (o.mask()) check_dense("mask", *o.mask());
  if (o.key_index()) check_dense("key_index", *o.key_index());
  AttentionArguments r{o.rules()};
  r.mask = o.mask();
  r.kv_lens = o.kv_lens();
  r.dropout_seed = dropout_seed(o.dropout_p(), query.device());
  r.key_index = o.key_index();
  r.key_block = o.key_block();
  if (const auto* number = std::get_if<int64_t>(&o.q_offset())) {
    r.q_offset = *number;
  } else if (const auto* tensor = std::get_if<Tensor>(&o.q_offset())) {
    r.q_offsets = *tensor;
  } else if (query.dim() == 4 && key.dim() == 4) {  // otherwise the op's own check says what is wrong
    if (o.kv_lens() && at::isIntegralType(o.kv_lens()->scalar_type(), /*includeBool=*/false))
      r.q_offsets = clamped(*o.kv_lens(), key.sym_size(2)).sub(query.sym_size(2));
    else
      r.q_offset = key.sym_size(2) - query.sym_size(2);
  }
  return r;
}

}  // namespace

AttentionResult attention_with_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const AttentionOptions& options) {
  const auto args = make_arguments(query, key, options);
  check_dense("value", value);
  return attention_op(scale_queries(query, options.query_scale()), key, value, args);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options) {
  return std::get<0>(attention_with_lse(query, key, value, options));
}

Tensor attention_scores(const Tensor& query, const Tensor& key, const AttentionOptions& options,
                        const std::string& stage) {
  static const DispatchedOp<decltype(scores_formula)> op("attnpack::attention_scores");
  return op(scale_queries(query, options.query_scale()), key, make_arguments(query, key, options), stage);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("attention(Tensor query, Tensor key, Tensor value, " ATTNPACK_ATTENTION_SCHEMA ") -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, " ATTNPACK_ATTENTION_SCHEMA
      ", bool mask_gradient=False, bool sinks_gradient=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("attention_scores(Tensor query, Tensor key, " ATTNPACK_ATTENTION_SCHEMA ", str stage=\"probs\") -> Tensor",
        attnpack::from_schema<attnpack::scores_formula>);
}
