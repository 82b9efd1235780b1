#include <torch/library.h>

#include <attnpack/ops/batched/folded_attention.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

// The tensors of sample n.
Tensor of_sample(const Sampled& x, int64_t n) { return x.batched ? x.tensor.select(0, n) : x.tensor; }
std::optional<Tensor> of_sample(const std::optional<Sampled>& x, int64_t n) {
  return x ? std::make_optional(of_sample(*x, n)) : std::nullopt;
}
AttentionArguments arguments_of_sample(const SampledAttention& call, int64_t n) {
  AttentionArguments args = call.args;
  args.mask = of_sample(call.mask, n);
  args.q_offsets = of_sample(call.q_offsets, n);
  args.kv_lens = of_sample(call.kv_lens, n);
  args.sinks = of_sample(call.sinks, n);
  args.alibi_slopes = of_sample(call.alibi_slopes, n);
  args.dropout_seed = of_sample(call.dropout_seed, n);
  args.key_index = of_sample(call.key_index, n);
  return args;
}

// One call for each sample; the results side by side.
template <class Results, class Call>
Results for_each_sample(const VmapLevel& level, const Call& call) {
  std::array<std::vector<Tensor>, std::tuple_size_v<Results>> parts;
  const int64_t samples = level.samples().guard_int(__FILE__, __LINE__);
  ATTNPACK_CHECK(samples > 0, "torch.func.vmap over 0 samples: this call wants at least one");
  for (int64_t n = 0; n < samples; ++n)
    std::apply(
        [&](const auto&... result) {
          size_t i = 0;
          (parts[i++].push_back(result), ...);
        },
        call(n));
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return Results{level.wrap(at::stack(parts[I]))...};
  }(std::make_index_sequence<std::tuple_size_v<Results>>());
}

AttentionResult attention_batched(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const AttentionArguments& args) {
  check_attention(query, key, value, args);
  VmapLevel level;
  const SampledAttention call(level, query, key, value, args);
  if (level.is_foreign()) return attention_op(query, key, value, args);
  const Fold fold = call.fold(/*gradients=*/false, false);
  if (fold == Fold::kNone)
    return for_each_sample<AttentionResult>(level, [&](int64_t n) {
      return attention_op(of_sample(call.query, n), of_sample(call.key, n), of_sample(call.value, n),
                          arguments_of_sample(call, n));
    });
  FoldedAttention one = fold_attention(level, call, fold, /*gradients=*/false, false);
  const auto [out, lse] = attention_op(one.query, one.key, one.value, one.args);
  const auto hidden = [&](const Tensor& x) { return level.wrap(unfold_samples(x, fold, level.samples())); };
  return {hidden(out), hidden(lse)};
}

AttentionGradients attention_backward_batched(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                              const Tensor& query, const Tensor& key, const Tensor& value,
                                              const Tensor& out, const Tensor& lse, const AttentionArguments& args,
                                              bool mask_gradient, bool sinks_gradient) {
  check_attention_backward(grad_out, grad_lse, query, key, value, out, lse, args, mask_gradient, sinks_gradient);
  VmapLevel level;
  const SampledAttention call(level, query, key, value, args);
  const Sampled d_out = level.unwrap(grad_out), o = level.unwrap(out), l = level.unwrap(lse);
  const std::optional<Sampled> d_lse = level.unwrap(grad_lse);
  if (level.is_foreign())
    return attention_backward_op(grad_out, grad_lse, query, key, value, out, lse, args, mask_gradient, sinks_gradient);
  const Fold fold = call.fold(/*gradients=*/true, sinks_gradient);
  if (fold == Fold::kNone)
    return for_each_sample<AttentionGradients>(level, [&](int64_t n) {
      return attention_backward_op(of_sample(d_out, n), of_sample(d_lse, n), of_sample(call.query, n),
                                   of_sample(call.key, n), of_sample(call.value, n), of_sample(o, n), of_sample(l, n),
                                   arguments_of_sample(call, n), mask_gradient, sinks_gradient);
    });
  FoldedAttention one = fold_attention(level, call, fold, /*gradients=*/true, mask_gradient);
  const auto folded = [&](const Sampled& x) { return fold_samples(level.with_samples(x), fold); };
  const auto [d_query, d_key, d_value, d_mask, d_sinks] =
      attention_backward_op(folded(d_out), d_lse ? std::make_optional(folded(*d_lse)) : std::nullopt, one.query,
                            one.key, one.value, folded(o), folded(l), one.args, mask_gradient, sinks_gradient);
  const c10::SymInt& samples = level.samples();
  const auto hidden = [&](const Tensor& x) { return level.wrap(unfold_samples(x, fold, samples)); };
  return {hidden(d_query), hidden(d_key), hidden(d_value),
          mask_gradient ? level.wrap(unfold_mask_gradient(d_mask, fold, samples, args.mask->sym_sizes())) : d_mask,
          sinks_gradient ? level.wrap(d_sinks.reshape_symint({samples, call.num_heads()})) : d_sinks};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatched, m) {
  m.impl("attention", attnpack::from_schema<attnpack::attention_batched>);
  m.impl("attention_backward", attnpack::from_schema<attnpack::attention_backward_batched>);
}
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) {
  m.impl("attention_scores", attnpack::from_schema<attnpack::scores_formula>);
}
