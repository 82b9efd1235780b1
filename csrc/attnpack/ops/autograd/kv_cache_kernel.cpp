#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/kv_cache.h>

namespace attnpack {
namespace {

using at::Tensor;

// Counts the writes as in-place changes, so that autograd notices a stale use.
void count_writes(std::initializer_list<const Tensor*> written) {
  for (const Tensor* tensor : written)
    if (!tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
}

// A cache stores values without history.
void kv_cache_append_autograd(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                              const Tensor& key, const Tensor& value, const std::optional<Tensor>& new_lens,
                              std::optional<c10::SymInt> limit, const std::optional<Tensor>& dropped) {
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    kv_cache_append_(cache_key, cache_value, lengths, key, value, new_lens, limit, dropped);
  }
  count_writes({&cache_key, &cache_value, &lengths});
}

// For calls without gradients only; with them the layer's function takes the ops one by one.
Tensor kv_cache_append_rotated_autograd(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                        const Tensor& query, const Tensor& key, const Tensor& value,
                                        at::ArrayRef<double> inv_freq, double factor, bool interleaved,
                                        const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit,
                                        const std::optional<Tensor>& dropped) {
  ATTNPACK_CHECK(!at::GradMode::is_enabled() || !(query.requires_grad() || key.requires_grad()),
                 "query or key want gradients, which kv_cache_append_rotated_ has none of: call it under no_grad");
  Tensor rotated;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    rotated = kv_cache_append_rotated_(cache_key, cache_value, lengths, query, key, value, inv_freq, factor,
                                       interleaved, new_lens, limit, dropped);
  }
  count_writes({&cache_key, &cache_value, &lengths});
  return rotated;
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("kv_cache_append_", attnpack::kv_cache_append_autograd);
  m.impl("kv_cache_append_rotated_", attnpack::kv_cache_append_rotated_autograd);
}
