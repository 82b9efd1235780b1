#pragma once

#include <attnpack/cache/indexed_cache.h>

namespace attnpack {

// The latents of MultiHeadLatentAttention. A position takes kv_lora_rank + qk_rope_head_dim numbers: c after its norm
// and the rotated k_rope side by side, in one buffer that the absorbed path reads as it is. Grows as DynamicCache does.
// Under SparseLatentAttention it holds the indexer's keys too.
class LatentCache : public IndexedCache {
 public:
  LatentCache() = default;
  explicit LatentCache(Unfilled unfilled) : IndexedCache(unfilled) {}
  // Over tensors that somebody else holds too; key [B, 1, capacity, kv_lora_rank + rope], value [B, 1, capacity, 0].
  LatentCache(CacheTensors tensors, int64_t kv_lora_rank)
      : IndexedCache(std::move(tensors)), kv_lora_rank_(kv_lora_rank) {}

  // Raises: keys and values of other attention belong into a DynamicCache.
  CacheTensors reserve(const at::Tensor& key, const at::Tensor& value) override;
  // Raises where the indexer of the held positions has not made room for these.
  CacheTensors reserve_latents(const at::Tensor& latents, int64_t kv_lora_rank) override;
  void reset() override;
  std::shared_ptr<KVCache> clone() const override { return with_copied_index(copy_of(*this)); }
  void visit_numbers(NumberVisitor visit) override {
    IndexedCache::visit_numbers(visit);
    visit_int(visit, "kv_lora_rank", kv_lora_rank_);
  }

  // The latents c, which are also the values of the absorbed path: [B, 1, len, kv_lora_rank], a view of k().
  at::Tensor v() const override;
  // [B, 1, len, qk_rope_head_dim], a view of k(); undefined before the first append, as k() and v().
  at::Tensor k_rope() const;
  int64_t kv_lora_rank() const { return kv_lora_rank_; }  // 0 before the first append

 private:
  int64_t kv_lora_rank_ = 0;
};

}  // namespace attnpack
