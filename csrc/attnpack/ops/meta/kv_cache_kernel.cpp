#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/kv_cache.h>

namespace attnpack {
namespace {

using at::Tensor;

void kv_cache_append_meta(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                          const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt>,
                          const std::optional<Tensor>& dropped) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens, dropped);
}

Tensor kv_cache_append_rotated_meta(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                    const Tensor& query, const Tensor& key, const Tensor& value,
                                    at::ArrayRef<double> inv_freq, double, bool, const std::optional<Tensor>& new_lens,
                                    std::optional<c10::SymInt>, const std::optional<Tensor>& dropped) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens, dropped);
  check_rotated(query, key, inv_freq);
  return at::empty_like(query);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("kv_cache_append_", attnpack::kv_cache_append_meta);
  m.impl("kv_cache_append_rotated_", attnpack::kv_cache_append_rotated_meta);
}
