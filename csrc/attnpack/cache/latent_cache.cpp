#include <attnpack/cache/latent_cache.h>

#include <ATen/ATen.h>

#include <attnpack/core/check.h>

namespace attnpack {

CacheTensors LatentCache::reserve(const at::Tensor& key, const at::Tensor&) {
  ATTNPACK_CHECK(false, "cache: got a LatentCache, want one of keys and values for keys of shape ", key.sizes(),
                 "; use a DynamicCache or StaticCache, a LatentCache serves MultiHeadLatentAttention");
}

CacheTensors LatentCache::reserve_latents(const at::Tensor& latents, int64_t kv_lora_rank) {
  ATTNPACK_CHECK(len() == 0 || kv_lora_rank == kv_lora_rank_, "cache: got latents of kv_lora_rank ", kv_lora_rank,
                 ", want ", kv_lora_rank_, " as the cache holds; use a cache of this layer's shape, or reset() it");
  next_rank_ = kv_lora_rank;
  return DynamicCache::reserve(latents, latents.narrow(-1, 0, 0));
}

void LatentCache::commit(int64_t new_len, const std::optional<at::Tensor>& new_lens) {
  DynamicCache::commit(new_len, new_lens);
  kv_lora_rank_ = next_rank_;
}

void LatentCache::reset() {
  DynamicCache::reset();
  kv_lora_rank_ = 0;
}

std::shared_ptr<KVCache> LatentCache::clone() const {
  auto copy = std::make_shared<LatentCache>(*this);
  copy->tensors_ = copy_tensors(tensors_);
  return copy;
}

at::Tensor LatentCache::v() const { return k().defined() ? k().narrow(3, 0, kv_lora_rank_) : at::Tensor(); }

at::Tensor LatentCache::k_rope() const {
  return k().defined() ? k().narrow(3, kv_lora_rank_, k().size(3) - kv_lora_rank_) : at::Tensor();
}

}  // namespace attnpack
