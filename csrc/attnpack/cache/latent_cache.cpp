#include <attnpack/cache/latent_cache.h>

#include <ATen/ATen.h>

#include <attnpack/core/padded.h>

namespace attnpack {

CacheTensors LatentCache::reserve(const at::Tensor& key, const at::Tensor&) {
  check_defined("key", key);
  ATTNPACK_CHECK(false, "cache: got a LatentCache, want one of keys and values for keys of shape ", key.sizes(),
                 "; use a DynamicCache or StaticCache, a LatentCache serves MultiHeadLatentAttention");
}

CacheTensors LatentCache::reserve_latents(const at::Tensor& latents, int64_t kv_lora_rank) {
  check_defined("latents", latents);
  ATTNPACK_CHECK(sym_len() == 0 || kv_lora_rank == kv_lora_rank_, "cache: got latents of kv_lora_rank ", kv_lora_rank,
                 ", want ", kv_lora_rank_, " as the cache holds; use a cache of this layer's shape, or reset() it");
  ATTNPACK_CHECK(!index_.defined() || is_ready(latents.sym_size(2)),
                 "cache: got a LatentCache with the keys of an indexer, want one of its own for a layer without this "
                 "indexer; use another LatentCache there, or reset() it");
  auto room = DynamicCache::reserve(latents, latents.narrow(-1, 0, 0));
  kv_lora_rank_ = kv_lora_rank;
  return room;
}

void LatentCache::reset() {
  IndexedCache::reset();
  kv_lora_rank_ = 0;
}

at::Tensor LatentCache::v() const { return k().defined() ? k().narrow_symint(3, 0, kv_lora_rank_) : at::Tensor(); }

at::Tensor LatentCache::k_rope() const {
  return k().defined() ? k().narrow_symint(3, kv_lora_rank_, k().sym_size(3) - kv_lora_rank_) : at::Tensor();
}

}  // namespace attnpack
