#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/ops/kv_cache.h>
#include <attnpack/rope/scaling.h>

#include <optional>

namespace attnpack {

// The inputs of a layer's function other than its projected tensors.
struct LayerInputs {
  std::optional<RopeSettings> rope;
  // Positions of the new tokens for RoPE only, int64 [L] or [B, L]; default: after the cache, else 0..L-1.
  std::optional<at::Tensor> positions;
  // Keys come from another sequence: they are rotated at 0..Lkv-1.
  bool cross = false;
  std::optional<CacheTensors> cache;
  std::optional<at::Tensor> mask;
  bool causal = false;
  // Valid new tokens (cross: valid context keys) of each sequence, [B].
  std::optional<at::Tensor> kv_lens;
  double dropout_p = 0.0;
  // Default 1 / sqrt of the query's last dim.
  std::optional<double> scale;
};

}  // namespace attnpack
