#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/lazy/resolve.h>

// For tensors whose negation or conjugation is still to be done. torch's own fallback breaks such tensors in ops that
// write in place.
namespace attnpack {
namespace {

using at::Tensor;

void check_cache(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths) {
  for (const Tensor* x : {&cache_key, &cache_value, &lengths})
    ATTNPACK_CHECK(
        !x->is_neg() && !x->is_conj(), "the cache has a tensor of shape ", x->sizes(),
        " that is a lazy minus or conjugate, wants memory to write to: call resolve_neg() or resolve_conj()");
}

void kv_cache_append_lazy(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                          const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit,
                          const std::optional<Tensor>& dropped) {
  check_cache(cache_key, cache_value, lengths);
  kv_cache_append_(cache_key, cache_value, lengths, resolve(key), resolve(value), resolve(new_lens), limit,
                   resolve(dropped));
}

Tensor kv_cache_append_rotated_lazy(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                    const Tensor& query, const Tensor& key, const Tensor& value,
                                    at::ArrayRef<double> inv_freq, double factor, bool interleaved,
                                    const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit,
                                    const std::optional<Tensor>& dropped) {
  check_cache(cache_key, cache_value, lengths);
  return kv_cache_append_rotated_(cache_key, cache_value, lengths, resolve(query), resolve(key), resolve(value),
                                  inv_freq, factor, interleaved, resolve(new_lens), limit, resolve(dropped));
}

void register_appends(torch::Library& m) {
  m.impl("kv_cache_append_", kv_cache_append_lazy);
  m.impl("kv_cache_append_rotated_", kv_cache_append_rotated_lazy);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Negative, m) { attnpack::register_appends(m); }
TORCH_LIBRARY_IMPL(attnpack, Conjugate, m) { attnpack::register_appends(m); }
