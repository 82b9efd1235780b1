#pragma once

#include <attnpack/cache/kv_cache.h>
#include <attnpack/distributed/group.h>
#include <attnpack/ops/attention.h>

#include <optional>
#include <utility>

// Keys of which position p lies on rank p mod ranks, and the others have none of it.
namespace attnpack::distributed {

// How many of the first `lengths` positions of each sequence a rank holds.
at::Tensor held_positions(const at::Tensor& lengths, int64_t rank, int64_t ranks);  // int64 [B] -> [B]

// Appends to a cache those of the new tokens that this rank holds: the keys and values that it then has. The whole
// sequences hold `past` positions, and new_lens of the new tokens are valid.
std::pair<at::Tensor, at::Tensor> append_share(KVCache& cache,
                                               const at::Tensor& key,       // [B, Hkv, L, D]; latents [B, 1, L, C + R]
                                               const at::Tensor& value,     // [B, Hkv, L, Dv]; of latents Dv = 0
                                               const at::Tensor& past,      // int64 [B]
                                               const at::Tensor& new_lens,  // int64 [B]
                                               int64_t kv_lora_rank,        // of latents; 0: keys and values
                                               const Group& group);         // -> [B, Hkv, K, D] and [B, Hkv, K, Dv]

// Attention over the keys of all ranks: each rank attends
// over those that it holds, and the results are joined by their lse, in one collective. The rows of a sequence stand
// from its position `past` on. Sequences hold kv_lens of the K keys. options: the rules of scores. No gradient.
at::Tensor attend_sharded_keys(const at::Tensor& query,                               // [B, Hq, L, D]
                               const at::Tensor& key,                                 // [B, Hkv, K, D]
                               const at::Tensor& value,                               // [B, Hkv, K, Dv]
                               const at::Tensor& past,                                // int64 [B] or [1]
                               const std::optional<at::Tensor>& kv_lens,              // [B]
                               const AttentionOptions& options, const Group& group);  // -> [B, Hq, L, Dv]

// The same for latent attention, over latents. One token reads them as they are; more expand those of this rank.
// options: with scale.
at::Tensor attend_sharded_latents(const at::Tensor& query,                // [B, H, L, N + R], rotated
                                  const at::Tensor& latents,              // [B, 1, K, C + R], rotated
                                  int64_t rotated_dim,                    // R
                                  const std::optional<at::Tensor>& kv_b,  // [H * (N + V), C], or folded
                                  int64_t v_dim, const at::Tensor& past, const std::optional<at::Tensor>& kv_lens,
                                  const AttentionOptions& options, const Group& group);  // -> [B, H, L, V or C]

}  // namespace attnpack::distributed
