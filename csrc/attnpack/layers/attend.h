#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/arg.h>

#include <optional>
#include <tuple>
#include <vector>

#include <attnpack/layers/append.h>
#include <attnpack/ops/attention.h>
#include <attnpack/rope/rotate.h>

namespace attnpack {

struct AttendOptions {
  TORCH_ARG(std::optional<RopeSettings>, rope);
  // Positions of the new tokens for RoPE only, int64 [L] or [B, L]; default: behind the cache, else 0..L-1.
  TORCH_ARG(std::optional<at::Tensor>, positions);
  // Keys come from another sequence: they are rotated at 0..Lkv-1.
  TORCH_ARG(bool, cross) = false;
  TORCH_ARG(std::optional<CacheTensors>, cache);
  TORCH_ARG(std::optional<at::Tensor>, mask);
  TORCH_ARG(bool, causal) = false;
  // Valid new tokens (cross: valid context keys) of each sequence, [B].
  TORCH_ARG(std::optional<at::Tensor>, kv_lens);
  TORCH_ARG(Window, window) = { -1, -1 };
  TORCH_ARG(double, softcap) = 0.0;
  TORCH_ARG(std::optional<at::Tensor>, sinks);
  TORCH_ARG(std::optional<at::Tensor>, alibi_slopes);
  TORCH_ARG(std::optional<std::vector<int64_t>>, head_map);
  TORCH_ARG(double, dropout_p) = 0.0;
  TORCH_ARG(std::optional<double>, scale);
};

// What follows the projections of every MHA / GQA / MQA layer: rotate, append to the cache, attend, join the heads.
at::Tensor attend(const at::Tensor& query,             // [B, Hq, L, D], before rotation
                  const at::Tensor& key,               // [B, Hkv, Lkv, D], before rotation
                  const at::Tensor& value,             // [B, Hkv, Lkv, Dv]
                  const AttendOptions& options = {});  // -> [B, L, Hq * Dv]

// The same and the probabilities before dropout, [B, Hq, L, keys].
std::tuple<at::Tensor, at::Tensor> attend_with_weights(const at::Tensor& query, const at::Tensor& key,
                                                       const at::Tensor& value, const AttendOptions& options = {});

// Query and key as they enter the operator, without a cache.
std::tuple<at::Tensor, at::Tensor> rotate(const at::Tensor& query, const at::Tensor& key, const AttendOptions& options);

}  // namespace attnpack
