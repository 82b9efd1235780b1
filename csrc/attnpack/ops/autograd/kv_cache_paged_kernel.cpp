#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <attnpack/ops/kv_cache_paged.h>

namespace attnpack {
namespace {

using at::Tensor;

// A cache stores values without history. Autograd notices a stale use by the counted writes.
void kv_cache_append_paged_autograd(const Tensor& key_pool, const Tensor& value_pool, const Tensor& block_table,
                                    const Tensor& lengths, const Tensor& key, const Tensor& value,
                                    const std::optional<Tensor>& new_lens, const std::optional<Tensor>& cu_seqlens) {
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    kv_cache_append_paged_(key_pool, value_pool, block_table, lengths, key, value, new_lens, cu_seqlens);
  }
  for (const Tensor* written : {&key_pool, &value_pool, &lengths})
    if (!written->is_inference()) written->unsafeGetTensorImpl()->bump_version();
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("kv_cache_append_paged_", attnpack::kv_cache_append_paged_autograd);
}
