#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/rope.h>

namespace attnpack {
namespace {

void warn_once() {
  TORCH_WARN_ONCE(
      "attnpack: no CUDA kernels run here: they are not built, not loaded, or too new for this device or its driver "
      "(`attnpack info` says which). CUDA tensors run through a composition of ATen ops with the same results, which "
      "holds the scores [batch, num_heads, q_len, kv_len] in memory.");
}

}  // namespace

AttentionResult attention_composed(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const AttentionArguments& args) {
  warn_once();
  return attention_formula(query, key, value, args);
}

AttentionGradients attention_backward_composed(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                               const Tensor& query, const Tensor& key, const Tensor& value,
                                               const AttentionArguments& args, bool mask_gradient,
                                               bool sinks_gradient) {
  return attention_backward_formula(grad_out, grad_lse, query, key, value, args, mask_gradient, sinks_gradient);
}

void add_up_to_capacity(const Tensor& lengths, const Tensor& counts, int64_t capacity,
                        const std::optional<Tensor>& dropped) {
  lengths.add_(counts);
  dropped ? lengths.clamp_max_(*dropped + capacity) : lengths.clamp_max_(capacity);
}

void kv_cache_append_composed(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                              const Tensor& key, const Tensor& value, const std::optional<Tensor>& new_lens,
                              const std::optional<Tensor>& dropped) {
  if (key.size(2) == 0) return;
  const Tensor counts = new_lens ? new_lens->to(at::kLong) : at::full_like(lengths, key.size(2));
  // Slot j of sequence b takes new position j - (lengths - dropped)[b], where there is one.
  const Tensor stored = dropped ? lengths - *dropped : lengths;                                  // [B]
  const Tensor source = at::arange(cache_key.size(2), lengths.options()) - stored.unsqueeze(1);  // [B, capacity]
  const Tensor fresh = source.ge(0).logical_and(source < counts.unsqueeze(1)).unsqueeze(1).unsqueeze(-1);
  const Tensor index = source.clamp(0, key.size(2) - 1).unsqueeze(1).unsqueeze(-1);
  const auto write = [&](const Tensor& cache, const Tensor& x) {
    cache.copy_(at::where(fresh, x.gather(2, index.expand(cache.sizes())), cache));
  };
  write(cache_key, key);
  write(cache_value, value);
  add_up_to_capacity(lengths, counts, cache_key.size(2), dropped);
}

Tensor kv_cache_append_rotated_composed(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                        const Tensor& query, const Tensor& key, const Tensor& value,
                                        at::ArrayRef<double> inv_freq, double factor, bool interleaved,
                                        const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit,
                                        const std::optional<Tensor>& dropped) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens, dropped);
  check_rotated(query, key, inv_freq);
  const Tensor positions = lengths.unsqueeze(1) + at::arange(key.size(2), lengths.options());  // [B, L]
  const auto [cos, sin] = rope_table(positions, inv_freq, factor);
  const auto rotate = [&, c = cos.unsqueeze(1), s = sin.unsqueeze(1)](const Tensor& x) {
    return apply_rope(x, c, s, interleaved);
  };
  const Tensor rotated = rotate(query);
  kv_cache_append_(cache_key, cache_value, lengths, rotate(key), value, new_lens, limit, dropped);
  return rotated;
}

}  // namespace attnpack
