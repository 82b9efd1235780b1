#pragma once

#include <attnpack/distributed/group.h>
#include <attnpack/ops/attention.h>

#include <optional>

namespace attnpack::distributed {

// Attention over keys of which position p lies on rank p mod ranks, and the others have none of it: each rank attends
// over those that it holds, and the results are joined by their lse, in one collective. The rows of a sequence stand
// from its position `past` on. Sequences hold kv_lens of the K keys. options: the rules of scores. No gradient.
at::Tensor attend_sharded_keys(const at::Tensor& query,                               // [B, Hq, L, D]
                               const at::Tensor& key,                                 // [B, Hkv, K, D]
                               const at::Tensor& value,                               // [B, Hkv, K, Dv]
                               const at::Tensor& past,                                // int64 [B] or [1]
                               const std::optional<at::Tensor>& kv_lens,              // [B]
                               const AttentionOptions& options, const Group& group);  // -> [B, Hq, L, Dv]

}  // namespace attnpack::distributed
