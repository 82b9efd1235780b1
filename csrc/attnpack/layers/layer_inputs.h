#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/score_rules.h>
#include <attnpack/rope/scaling.h>

#include <optional>

namespace attnpack {

// The inputs of a layer's function other than its projected tensors. The default of scale is 1 / sqrt of the query's
// last dim.
struct LayerInputs : ScoreRules {
  std::optional<RopeSettings> rope;
  // Positions of the new tokens for RoPE only, int64 [L] or [B, L]; default: after the cache, else 0..L-1.
  std::optional<at::Tensor> positions;
  // Keys come from another sequence: they are rotated at 0..Lkv-1.
  bool cross = false;
  std::optional<CacheTensors> cache;
  std::optional<at::Tensor> mask;
  // Valid new tokens (cross: valid context keys) of each sequence, [B].
  std::optional<at::Tensor> kv_lens;
};

}  // namespace attnpack
