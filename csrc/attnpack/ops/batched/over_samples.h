#pragma once

#include <array>
#include <tuple>
#include <vector>

#include <attnpack/ops/batched/vmap_level.h>
#include <attnpack/ops/detail/optional_tensor.h>

namespace attnpack {

// A call under vmap of an op over sequences. rows: its tensors [B, ...], undefined where one is missing. others: those
// without a batch, such as weights. call(rows, others, kv_lens, cu_seqlens) gives a tuple of tensors.
//
// Where the samples can be rows of the batch it is one call: not for packed sequences, whose batch is one; not if one
// of the others differs between samples; and not for the gradients of the others, which each sample has for itself.
template <class Result, class Call>
Result over_samples(const std::vector<Tensor>& rows, const std::vector<Tensor>& others,
                    const std::optional<Tensor>& kv_lens, const std::optional<Tensor>& cu_seqlens, bool foldable,
                    const Call& call) {
  VmapLevel level;
  const auto unwrap = [&](const std::vector<Tensor>& tensors) {
    std::vector<Sampled> sampled;
    for (const Tensor& x : tensors) sampled.push_back(x.defined() ? level.unwrap(x) : Sampled());
    return sampled;
  };
  const std::vector<Sampled> sampled = unwrap(rows), beside = unwrap(others);
  const std::optional<Sampled> lens = level.unwrap(kv_lens), ends = level.unwrap(cu_seqlens);
  if (level.is_foreign()) return call(rows, others, kv_lens, cu_seqlens);
  const auto each = [](const std::vector<Sampled>& tensors, const auto& f) {
    std::vector<Tensor> result;
    for (const Sampled& x : tensors) result.push_back(x.tensor.defined() ? f(x) : Tensor());
    return result;
  };
  for (const Sampled& x : beside) foldable = foldable && !x.batched;
  if (foldable && !ends) {
    const auto fold = [&](const Sampled& x) { return level.with_samples(x).flatten(0, 1); };
    Result folded = call(each(sampled, fold), each(beside, [](const Sampled& x) { return x.tensor; }),
                         lens ? std::make_optional(fold(*lens)) : std::nullopt, std::nullopt);
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
    const auto maybe = [&](const std::optional<Sampled>& x) { return x ? std::make_optional(one(*x)) : std::nullopt; };
    size_t i = 0;
    std::apply([&](const auto&... x) { (parts[i++].push_back(x), ...); },
               call(each(sampled, one), each(beside, one), maybe(lens), maybe(ends)));
  }
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return Result{level.wrap(at::stack(parts[I]))...};
  }(std::make_index_sequence<std::tuple_size_v<Result>>());
}

}  // namespace attnpack
