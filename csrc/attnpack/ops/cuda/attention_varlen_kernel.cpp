#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/varlen_arguments.h>

// A composition: one call of `attention` for each sequence. It reads cu_seqlens, so it waits for the device.
namespace attnpack {
namespace {

AttentionResult attention_varlen_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  return attend_each_sequence(&attention_op, query, key, value, cu_seqlens_q, args);
}

VarlenGradients attention_varlen_backward_cuda(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                               const Tensor& query, const Tensor& key, const Tensor& value,
                                               const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                               const VarlenArguments& args, bool sinks_gradient) {
  check_attention_varlen_backward(grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, args, sinks_gradient);
  const std::vector<Sequence> sequences = read_sequences(query, key, cu_seqlens_q, args);
  const auto zeros = [](const Tensor& t) { return at::zeros(t.sizes(), t.options()); };
  const Tensor grad_query = zeros(query), grad_key = zeros(key), grad_value = zeros(value);
  Tensor grad_sinks = sinks_gradient ? zeros(*args.sinks) : at::empty({0}, query.options());
  for (size_t b = 0; b < sequences.size(); ++b) {
    const Sequence& s = sequences[b];
    const auto queries = [&](const Tensor& x) { return x.narrow(0, s.first_query, s.q_len); };
    const auto keys = [&](const Tensor& x) { return x.narrow(0, s.first_key, s.kv_len); };
    const auto row_numbers = [&](const Tensor& x) {
      return x.narrow(1, s.first_query, s.q_len).contiguous().unsqueeze(0);
    };
    const auto [q, k, v, mask, sinks] = attention_backward_op(
        one_batch(queries(grad_out)), grad_lse ? std::make_optional(row_numbers(*grad_lse)) : std::nullopt,
        one_batch(queries(query)), one_batch(keys(key)), one_batch(keys(value)), one_batch(queries(out)),
        row_numbers(lse), sequence_arguments(args, s, b), false, sinks_gradient);
    queries(grad_query).copy_(packed_rows(q));
    keys(grad_key).copy_(packed_rows(k));
    keys(grad_value).copy_(packed_rows(v));
    if (sinks_gradient) grad_sinks = grad_sinks.add(sinks);
  }
  return {grad_query, grad_key, grad_value, grad_sinks};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("attention_varlen", attnpack::from_schema<attnpack::attention_varlen_cuda>);
  m.impl("attention_varlen_backward", attnpack::from_schema<attnpack::attention_varlen_backward_cuda>);
}
