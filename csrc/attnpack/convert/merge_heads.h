#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/convert/groups.h>
#include <torch/csrc/api/include/torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace attnpack::convert {

// The projections of one attention layer. Biases may be undefined. In attnpack's modules Dv is D.
struct AttentionWeights {
  at::Tensor q;                       // [Hq * D, E]
  at::Tensor k;                       // [Hkv * D, Ek]
  at::Tensor v;                       // [Hkv * Dv, Ev]
  at::Tensor o;                       // [E, Hq * Dv]
  at::Tensor q_bias, k_bias, v_bias;  // [Hq * D], [Hkv * D], [Hkv * Dv]
};

// The layer's inputs on calibration text, one row per token. Undefined: all directions count alike.
struct Calibration {
  at::Tensor x;              // [N, E]
  at::Tensor context;        // [N', Ek], default x
  at::Tensor value_context;  // [N', Ev], default context
};

struct MergeOptions {
  MergeOptions(int64_t num_heads, int64_t num_kv_heads, int64_t new_kv_heads)
      : num_heads_(num_heads), num_kv_heads_(num_kv_heads), new_kv_heads_(new_kv_heads) {}
  TORCH_ARG(int64_t, num_heads);     // Hq
  TORCH_ARG(int64_t, num_kv_heads);  // Hkv of the weights
  TORCH_ARG(int64_t, new_kv_heads);  // Hkv of the result
  // kv head that each query head reads; default: consecutive query heads share one.
  TORCH_ARG(std::optional<std::vector<int64_t>>, head_map);
  // pool_kv_heads' "mean", "first", "random"; "similar": the mean of groups that choose_groups finds; "aligned": heads
  // are rotated onto each other before they merge (align.h).
  TORCH_ARG(std::string, method) = "mean";
  TORCH_ARG(int64_t, window) = 1;
  TORCH_ARG(std::optional<Groups>, groups);
  TORCH_ARG(std::optional<uint64_t>, seed);
  TORCH_ARG(Calibration, calibration);
  // The first rope_dim dims of a head rotate, in pairs (i, i + rope_dim / 2) or (2i, 2i + 1).
  TORCH_ARG(int64_t, rope_dim) = 0;
  TORCH_ARG(bool, interleaved) = false;
  // Keys pass a norm after their projection. "aligned" then merges them by their mean.
  TORCH_ARG(bool, key_norm) = false;
  // Query heads are put in the order of their groups, so that consecutive ones share a kv head; groups must be even.
  TORCH_ARG(bool, reorder) = false;
};

// The result of merge_kv_heads.
struct MergedHeads {
  AttentionWeights weights;
  std::vector<int64_t> head_map;    // [Hq], into the new kv heads
  std::vector<int64_t> head_order;  // [Hq], where each query head of the result stood
  Groups groups;
};

// Raises unless the weights have the heads that options name.
void check_layer(const AttentionWeights& weights, const MergeOptions& options);

// A layer's weights with fewer kv heads. q and o change with "aligned" and reorder only; tensors that do not change
// are the ones given. No gradient.
MergedHeads merge_kv_heads(const AttentionWeights& weights, const MergeOptions& options);

}  // namespace attnpack::convert
