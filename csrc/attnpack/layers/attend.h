#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include <attnpack/layers/layer_inputs.h>
#include <attnpack/layers/select_keys.h>
#include <attnpack/ops/attention.h>

namespace attnpack {

struct AttendOptions : LayerInputs {
  // The keys, or blocks of key_block keys, that each query may attend, by their positions (with a cache: of the cache).
  std::optional<at::Tensor> key_index;  // [B, 1 or Hkv, L, n]
  int64_t key_block = 1;
  // In the place of both: select_blocks chooses by the rotated queries and all keys.
  std::optional<BlockOptions> blocks;
};

// An MHA, GQA or MQA layer after its projections: rotate, append to the cache, attend, join the heads.
at::Tensor attend(const at::Tensor& query,             // [B, Hq, L, D], before rotation
                  const at::Tensor& key,               // [B, Hkv, Lkv, D], before rotation
                  const at::Tensor& value,             // [B, Hkv, Lkv, Dv]
                  const AttendOptions& options = {});  // -> [B, L, Hq * Dv]

// The same, and the probabilities before dropout, [B, Hq, L, keys]; at_names: only those at the keys of key_index, as
// stage "named" of attention_scores gives them.
std::tuple<at::Tensor, at::Tensor> attend_with_weights(const at::Tensor& query, const at::Tensor& key,
                                                       const at::Tensor& value, const AttendOptions& options = {},
                                                       bool at_names = false);

// The same for queries over options.cache, which another layer has filled with the keys and values of these tokens too:
// nothing is appended to it. The query's last token stands at the last position of its sequence.
at::Tensor attend_shared(const at::Tensor& query,        // [B, Hq, L, D], before rotation
                         const AttendOptions& options);  // -> [B, L, Hq * Dv]
std::tuple<at::Tensor, at::Tensor> attend_shared_with_weights(const at::Tensor& query, const AttendOptions& options);

// Query and key as they enter the operator, without a cache.
std::tuple<at::Tensor, at::Tensor> rotate(const at::Tensor& query, const at::Tensor& key, const LayerInputs& inputs);

}  // namespace attnpack
