#include <attnpack/cache/static_cache.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

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
    return cache_zeros(o.batch(), o.num_kv_heads(), o.max_len(), width, o.tensor());
  };
  tensors_.key = zeros(o.head_dim());
  tensors_.value = zeros(o.v_head_dim().value_or(o.head_dim()));
  c10::InferenceMode normal(false);
  tensors_.lengths = at::zeros({o.batch()}, o.tensor().dtype(at::kLong));
}

CacheTensors StaticCache::reserve(const at::Tensor& key, const at::Tensor& value) {
  check_fits(tensors_, key, value);
  return tensors_;
}

int64_t StaticCache::len() const {
  const auto longest = tensors_.lengths.numel() ? tensors_.lengths.max().item<int64_t>() : 0;
  ATTNPACK_CHECK(longest >= 0, "the cache's lengths hold ", longest,
                 ", want 0 or more, the positions held of each sequence: call reset()");
  return longest;
}

int64_t StaticCache::nbytes() const {
  return static_cast<int64_t>(tensors_.key.numel() * tensors_.key.element_size() +
                              tensors_.value.numel() * tensors_.value.element_size());
}

void StaticCache::crop(int64_t n) {
  ATTNPACK_CHECK(n >= 0, "n: got ", n, ", want how many positions to keep, 0 or more");
  tensors_.lengths.clamp_max_(n);
}

void StaticCache::reorder(const at::Tensor& index) {
  const auto rows = check_index(index, lengths(), /*same_batch=*/true);
  at::NoGradGuard no_grad;
  for (auto* tensor : {&tensors_.key, &tensors_.value, &tensors_.lengths}) {
    tensor->copy_(tensor->index_select(0, rows));
  }
}

std::shared_ptr<KVCache> StaticCache::clone() const {
  auto copy = std::make_shared<StaticCache>(*this);
  copy->tensors_ = copy_tensors(tensors_);
  return copy;
}

}  // namespace attnpack
