#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <attnpack/ops/kv_cache.h>

namespace attnpack {
namespace {

using at::Tensor;

// A cache stores values without history; writes count as in-place changes, so that autograd notices a stale use.
void kv_cache_append_autograd(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                              const Tensor& key, const Tensor& value, const std::optional<Tensor>& new_lens,
                              std::optional<c10::SymInt> limit) {
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    kv_cache_append_(cache_key, cache_value, lengths, key, value, new_lens, limit);
  }
  for (const Tensor* written : {&cache_key, &cache_value, &lengths})
    if (!written->is_inference()) written->unsafeGetTensorImpl()->bump_version();
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) { m.impl("kv_cache_append_", attnpack::kv_cache_append_autograd); }
