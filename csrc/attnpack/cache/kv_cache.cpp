#include <attnpack/cache/kv_cache.h>

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/InferenceMode.h>

#include <attnpack/core/check.h>

namespace attnpack {

namespace {

void check_part(const char* name, const at::Tensor& held, const at::Tensor& added) {
  const bool same = added.dim() == 4 && added.sym_size(0) == held.sym_size(0) &&
                    added.sym_size(1) == held.sym_size(1) && added.sym_size(3) == held.sym_size(3);
  ATTNPACK_CHECK(same, "cache: got ", name, " of shape ", added.sym_sizes(), ", want [", held.sym_size(0), ", ",
                 held.sym_size(1), ", L, ", held.sym_size(3),
                 "] as the cache holds; use a cache of this layer's shape, or reset() it");
  ATTNPACK_CHECK(added.scalar_type() == held.scalar_type() && added.device() == held.device(), "cache: got ", name,
                 " in ", added.scalar_type(), " on ", added.device(), ", want ", held.scalar_type(), " on ",
                 held.device(), " as the cache holds; use a cache of the module's dtype and device");
}

}  // namespace

CacheTensors KVCache::reserve_latents(const at::Tensor& latents, int64_t) {
  return reserve(latents, latents.narrow(-1, 0, 0));
}

CacheState KVCache::state() const {
  if (!tensors_.key.defined()) return {{tensors_.lengths}, {}};
  return {{tensors_.lengths, tensors_.key, tensors_.value}, {}};
}

void check_crop(const c10::SymInt& n) {
  ATTNPACK_CHECK(n >= 0, "n: got ", n, ", want how many positions to keep, 0 or more");
}

void check_fits(const CacheTensors& cache, const at::Tensor& key, const at::Tensor& value) {
  check_part("keys", cache.key, key);
  check_part("values", cache.value, value);
}

at::Tensor check_index(const at::Tensor& index, const at::Tensor& lengths, bool same_batch) {
  const auto batch = lengths.sym_size(0);
  ATTNPACK_CHECK(index.dim() == 1 && index.scalar_type() == at::kLong && (!same_batch || index.sym_size(0) == batch),
                 "index: got ", index.scalar_type(), " of shape ", index.sym_sizes(), ", want int64 ",
                 same_batch ? c10::str("[", batch, "]: a StaticCache keeps its batch size")
                            : "sequence numbers [B]: call .long(), in C++ .to(at::kLong)");
  // Elsewhere reading would wait for the device. A tensor that torch.compile traces has no numbers yet.
  if (batch > 0 && index.is_cpu() && !at::isTensorSubclassLike(index)) {
    const auto read = index.contiguous();
    for (int64_t b = 0; b < read.numel(); ++b) {
      const auto row = read.const_data_ptr<int64_t>()[b];
      ATTNPACK_CHECK(row >= 0 && row < batch, "index[", b, "] is ", row, ", wants 0 to ", batch - 1,
                     ": a sequence that the cache holds");
    }
  }
  return index.to(lengths.device());
}

at::Tensor cache_zeros(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  c10::InferenceMode normal(false);
  return at::zeros_symint(sizes, options);
}

CacheTensors KVCache::copy_tensors(const CacheTensors& tensors) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const auto copy = [](const at::Tensor& t) { return t.defined() ? t.clone() : t; };
  return {copy(tensors.key), copy(tensors.value), copy(tensors.lengths)};
}

}  // namespace attnpack
