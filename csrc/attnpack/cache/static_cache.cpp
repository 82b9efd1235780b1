#include <attnpack/cache/static_cache.h>

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <attnpack/core/check.h>

namespace attnpack {

StaticCache::StaticCache(const StaticCacheOptions& o) {
  ATTNPACK_CHECK(o.batch() >= 0, "batch: got ", o.batch(), ", want 0 or more");
  const auto check_size = [](const char* name, int64_t size) {
    ATTNPACK_CHECK(size > 0, name, ": got ", size, ", want at least 1");
  };
  check_size("num_kv_heads", o.num_kv_heads());
  check_size("max_len", o.max_len());
  check_size("head_dim", o.head_dim());
  ATTNPACK_CHECK(o.v_head_dim().value_or(0) >= 0, "v_head_dim: got ", *o.v_head_dim(),
                 ", want at least 1, or 0 for latent attention");
  const auto dtype = c10::typeMetaToScalarType(o.tensor().dtype());
  ATTNPACK_CHECK(at::isFloatingType(dtype), "dtype: got ", dtype, ", want a floating one, that of the module");
  const auto zeros = [&](int64_t width) {
    return cache_zeros({o.batch(), o.num_kv_heads(), o.max_len(), width}, o.tensor());
  };
  tensors_.key = zeros(o.head_dim());
  tensors_.value = zeros(o.v_head_dim().value_or(o.head_dim()));
  tensors_.lengths = cache_zeros({o.batch()}, o.tensor().dtype(at::kLong));
}

CacheTensors StaticCache::reserve(const at::Tensor& key, const at::Tensor& value) {
  check_fits(tensors_, key, value);
  return tensors_;
}

c10::SymInt StaticCache::sym_len() const { return longest_length(tensors_.lengths, tensors_.key.sym_size(2)); }

c10::SymInt StaticCache::sym_nbytes() const { return tensors_.key.sym_nbytes() + tensors_.value.sym_nbytes(); }

void StaticCache::check_state() const {
  KVCache::check_state();
  ATTNPACK_CHECK(tensors_.key.defined(), "tensors: got no key and value, want those of a StaticCache, which allocates ",
                 "them at once");
}

void StaticCache::crop(const c10::SymInt& n) {
  check_crop(n);
  tensors_.lengths.clamp_max_(n);
}

void StaticCache::reorder(const at::Tensor& index) {
  const auto rows = check_index(index, lengths(), /*same_batch=*/true);
  at::NoGradGuard no_grad;
  // The room behind the held positions stays as it is.
  auto all_keys = tensors_.key, all_values = tensors_.value;
  const auto longest = known_length(tensors_.lengths, tensors_.key.sym_size(2));
  if (longest && !at::isTensorSubclassLike(rows)) {
    if (*longest == 0 || rows.equal(at::arange(rows.size(0), rows.options()))) return;
    all_keys = all_keys.narrow_symint(2, 0, *longest);
    all_values = all_values.narrow_symint(2, 0, *longest);
  }
  // A compiler fuses a copy in place with the selection, and then reads rows that it has written. An op keeps both
  // apart.
  const auto key = all_keys.index_select(0, rows), value = all_values.index_select(0, rows);
  const auto new_lens = tensors_.lengths.index_select(0, rows);
  tensors_.lengths.zero_();
  kv_cache_append_(tensors_.key, tensors_.value, tensors_.lengths, key, value, new_lens);
}

}  // namespace attnpack
