#pragma once

#include <attnpack/cache/dynamic_cache.h>
#include <attnpack/distributed/group.h>
#include <attnpack/ops/attention.h>

namespace attnpack::distributed {

// The share of one rank in a KV cache that no single process holds: position p lies on rank p mod ranks. All ranks make
// the same calls. No gradient flows. Sequences have one length.
class ShardedCache {
 public:
  explicit ShardedCache(Group group);

  // Appends this rank's share of the new keys and values, and attends over those of all ranks: one
  // collective of the queries' rows. The queries stand after the positions that were held before. Raises for mask,
  // dropout_p, q_offset and kv_lens, and on all ranks where arguments differ between them; the cache is then as it was.
  at::Tensor attend(const at::Tensor& query,                // [B, Hq, L, D], rotated
                    const at::Tensor& key,                  // [B, Hkv, L, D], rotated
                    const at::Tensor& value,                // [B, Hkv, L, Dv]
                    const AttentionOptions& options = {});  // -> [B, Hq, L, Dv]

  // Positions of the whole sequences.
  int64_t len() const { return len_; }
  // Bytes of the keys and values that this rank holds.
  int64_t nbytes() const { return cache_->nbytes(); }

 private:
  Group group_;
  std::shared_ptr<DynamicCache> cache_;
  int64_t len_ = 0;
};

}  // namespace attnpack::distributed
