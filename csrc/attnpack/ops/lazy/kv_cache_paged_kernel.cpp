#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/kv_cache_paged.h>
#include <attnpack/ops/lazy/resolve.h>

// For tensors whose negation or conjugation is still to be done, as kv_cache_kernel.cpp has it for its ops.
namespace attnpack {
namespace {

using at::Tensor;

void kv_cache_append_paged_lazy(const Tensor& key_pool, const Tensor& value_pool, const Tensor& block_table,
                                const Tensor& lengths, const Tensor& key, const Tensor& value,
                                const std::optional<Tensor>& new_lens, const std::optional<Tensor>& cu_seqlens) {
  for (const Tensor* x : {&key_pool, &value_pool, &lengths})
    ATTNPACK_CHECK(!x->is_neg() && !x->is_conj(), "a pool or lengths of shape ", x->sizes(),
                   " is a lazy minus or conjugate, wants memory to write to: call resolve_neg() or resolve_conj()");
  kv_cache_append_paged_(key_pool, value_pool, resolve(block_table), lengths, resolve(key), resolve(value),
                         resolve(new_lens), resolve(cu_seqlens));
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Negative, m) { m.impl("kv_cache_append_paged_", attnpack::kv_cache_append_paged_lazy); }
TORCH_LIBRARY_IMPL(attnpack, Conjugate, m) { m.impl("kv_cache_append_paged_", attnpack::kv_cache_append_paged_lazy); }
