#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <attnpack/ops/attention.h>
#include <attnpack/ops/detail/attention_args.h>

namespace attnpack {

AttentionResult attention_op(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTENTION_PARAMS) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("attnpack::attention", "")
          .typed<AttentionResult(const Tensor&, const Tensor&, const Tensor&, ATTNPACK_ATTENTION_PARAMS)>();
  return op.call(query, key, value, ATTNPACK_ATTENTION_ARGS);
}

AttentionGradients attention_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                         const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                                         const Tensor& lse, ATTNPACK_ATTENTION_PARAMS, bool mask_gradient,
                                         bool sinks_gradient) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("attnpack::attention_backward", "")
                             .typed<AttentionGradients(const Tensor&, const std::optional<Tensor>&, const Tensor&,
                                                       const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                       ATTNPACK_ATTENTION_PARAMS, bool, bool)>();
  return op.call(grad_out, grad_lse, query, key, value, out, lse, ATTNPACK_ATTENTION_ARGS, mask_gradient,
                 sinks_gradient);
}

namespace {

// Lengths as the operator takes them: on the CPU it refuses those out of range.
Tensor clamped(const Tensor& kv_lens, const c10::SymInt& kv_len) {
  return kv_lens.is_cpu() ? kv_lens : kv_lens.clamp(0, kv_len.guard_int(__FILE__, __LINE__));
}

// Fills what the schema wants from the options and calls f with it: "end" becomes numbers, dropout draws its seed.
template <class F>
auto with_arguments(const Tensor& query, const Tensor& key, const AttentionOptions& o, F&& f) {
  c10::SymInt q_offset = 0;
  std::optional<Tensor> q_offsets, seed;
  if (const auto* number = std::get_if<int64_t>(&o.q_offset())) {
    q_offset = *number;
  } else if (const auto* tensor = std::get_if<Tensor>(&o.q_offset())) {
    q_offsets = *tensor;
  } else if (query.dim() == 4 && key.dim() == 4) {  // otherwise the op's own check says what is wrong
    if (o.kv_lens() && at::isIntegralType(o.kv_lens()->scalar_type(), /*includeBool=*/false))
      q_offsets = clamped(*o.kv_lens(), key.sym_size(2)).sub(query.sym_size(2));
    else
      q_offset = key.sym_size(2) - query.sym_size(2);
  }
  if (o.dropout_p() > 0) seed = at::randint(std::numeric_limits<int64_t>::max(), {1}, at::kLong);
  at::OptionalIntArrayRef head_map;
  if (o.head_map()) head_map = *o.head_map();
  return f(o.mask(), o.causal(), q_offset, q_offsets, o.window()[0], o.window()[1], o.kv_lens(), o.softcap(), o.sinks(),
           o.alibi_slopes(), head_map, o.dropout_p(), seed, o.scale());
}

}  // namespace

AttentionResult attention_with_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const AttentionOptions& options) {
  return with_arguments(query, key, options, [&](ATTNPACK_ATTENTION_PARAMS) {
    return attention_op(query, key, value, ATTNPACK_ATTENTION_ARGS);
  });
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options) {
  return std::get<0>(attention_with_lse(query, key, value, options));
}

Tensor attention_scores(const Tensor& query, const Tensor& key, const AttentionOptions& options,
                        const std::string& stage) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("attnpack::attention_scores", "")
          .typed<Tensor(const Tensor&, const Tensor&, ATTNPACK_ATTENTION_PARAMS, c10::string_view)>();
  return with_arguments(query, key, options,
                        [&](ATTNPACK_ATTENTION_PARAMS) { return op.call(query, key, ATTNPACK_ATTENTION_ARGS, stage); });
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("attention(Tensor query, Tensor key, Tensor value, " ATTNPACK_ATTENTION_SCHEMA ") -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, " ATTNPACK_ATTENTION_SCHEMA
      ", bool mask_gradient, bool sinks_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("attention_scores(Tensor query, Tensor key, " ATTNPACK_ATTENTION_SCHEMA ", str stage) -> Tensor",
        &attnpack::scores_formula);
}
