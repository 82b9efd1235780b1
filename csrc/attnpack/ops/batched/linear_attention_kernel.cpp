#include <torch/library.h>

#include <attnpack/ops/batched/vmap_level.h>
#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

// Samples are rows of the batch. Packed sequences have a batch of one, so each sample is a call of its own there.
template <class Result, class Call>
Result over_samples(const LinearAttentionArguments& args, const std::vector<Tensor>& tensors, const Call& call) {
  VmapLevel level;
  std::vector<Sampled> sampled;
  for (const Tensor& x : tensors) sampled.push_back(x.defined() ? level.unwrap(x) : Sampled());
  const std::optional<Sampled> lens = level.unwrap(args.kv_lens), ends = level.unwrap(args.cu_seqlens);
  if (level.is_foreign()) return call(tensors, args.kv_lens, args.cu_seqlens);
  const auto each = [&](const auto& f) {
    std::vector<Tensor> result;
    for (const Sampled& x : sampled) result.push_back(x.tensor.defined() ? f(x) : Tensor());
    return result;
  };
  if (!args.cu_seqlens) {
    const auto fold = [&](const Sampled& x) { return level.with_samples(x).flatten(0, 1); };
    Result folded = call(each(fold), lens ? std::make_optional(fold(*lens)) : std::nullopt, std::nullopt);
    std::apply(
        [&](auto&... x) {
          // A gradient of an argument that is not given is the same for all samples.
          ((x = x.dim() == 1 ? x : level.wrap(x.unflatten_symint(0, {level.samples(), -1}))), ...);
        },
        folded);
    return folded;
  }
  const int64_t samples = level.samples().guard_int(__FILE__, __LINE__);
  ATTNPACK_CHECK(samples > 0, "torch.func.vmap over 0 samples: this call wants at least one");
  std::array<std::vector<Tensor>, std::tuple_size_v<Result>> parts;
  for (int64_t n = 0; n < samples; ++n) {
    const auto one = [&](const Sampled& x) { return x.batched ? x.tensor.select(0, n) : x.tensor; };
    size_t i = 0;
    std::apply([&](const auto&... x) { (parts[i++].push_back(x), ...); }, call(each(one), std::nullopt, one(*ends)));
  }
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return Result{(parts[I][0].dim() == 1 ? parts[I][0] : level.wrap(at::stack(parts[I])))...};
  }(std::make_index_sequence<std::tuple_size_v<Result>>());
}

LinearAttentionArguments with_tensors(const LinearAttentionArguments& args, const std::vector<Tensor>& x, size_t first,
                                      const std::optional<Tensor>& lens, const std::optional<Tensor>& ends) {
  const auto given = [&](size_t i) { return x[i].defined() ? std::make_optional(x[i]) : std::nullopt; };
  return {given(first), given(first + 1), given(first + 2), lens, ends, args.scale};
}

LinearAttentionResult linear_attention_batched(const Tensor& query, const Tensor& key, const Tensor& value,
                                               const LinearAttentionArguments& args) {
  check_linear_attention(query, key, value, args);
  const auto given = [](const std::optional<Tensor>& x) { return x.value_or(Tensor()); };
  return over_samples<LinearAttentionResult>(
      args, {query, key, value, given(args.log_decay), given(args.beta), given(args.initial_state)},
      [&](const std::vector<Tensor>& x, const auto& lens, const auto& ends) {
        return linear_attention_op(x[0], x[1], x[2], with_tensors(args, x, 3, lens, ends));
      });
}

LinearAttentionGradients linear_attention_backward_batched(const Tensor& grad_out,
                                                           const std::optional<Tensor>& grad_state, const Tensor& query,
                                                           const Tensor& key, const Tensor& value,
                                                           const LinearAttentionArguments& args) {
  check_linear_attention_backward(grad_out, grad_state, query, key, value, args);
  const auto given = [](const std::optional<Tensor>& x) { return x.value_or(Tensor()); };
  return over_samples<LinearAttentionGradients>(args,
                                                {grad_out, given(grad_state), query, key, value, given(args.log_decay),
                                                 given(args.beta), given(args.initial_state)},
                                                [&](const std::vector<Tensor>& x, const auto& lens, const auto& ends) {
                                                  return linear_attention_backward_op(
                                                      x[0], x[1].defined() ? std::make_optional(x[1]) : std::nullopt,
                                                      x[2], x[3], x[4], with_tensors(args, x, 5, lens, ends));
                                                });
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatched, m) {
  m.impl("linear_attention", attnpack::from_schema<attnpack::linear_attention_batched>);
  m.impl("linear_attention_backward", attnpack::from_schema<attnpack::linear_attention_backward_batched>);
}
