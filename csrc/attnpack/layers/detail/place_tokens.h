#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/FunctionRef.h>

#include <optional>

#include <attnpack/layers/detail/layer_arguments.h>
#include <attnpack/rope/rotate.h>

namespace attnpack {

// The tokens as they enter the operator, and the operator's arguments that the cache decides.
struct PlacedTokens {
  Tensor query;                     // [B, Hq, L, D], rotated
  Tensor key, value;                // [B, Hkv, keys, D], rotated, and [B, Hkv, keys, Dv]: all that may be read
  std::optional<Tensor> q_offsets;  // [B], slots of the cache that were in use before the call
  std::optional<Tensor> kv_lens;    // [B], valid keys
  bool cached = false;
};

// The new tokens of a layer before rotation. All dims of queries and keys rotate, or only the last `rotated_dims`.
struct NewTokens {
  Tensor query, key, value;
  std::optional<c10::SymInt> rotated_dims = std::nullopt;
};

// Rotates, and appends to the cache if there is one. `check` is asked about the keys and values that attention is to
// read, with their kv_lens. Everything is checked before the cache is written. Gradients flow only into the new rows.
PlacedTokens place_tokens(
    const NewTokens& tokens, const std::optional<CacheTensors>& cache, const LayerArguments& args,
    c10::function_ref<void(const Tensor& key, const Tensor& value, const std::optional<Tensor>& kv_lens)> check);

// Rotates queries over a cache that has their tokens' keys already, and reads it. The last query stands at the last
// position. `check` is asked about the keys and values.
PlacedTokens place_queries(const Tensor& query, const CacheTensors& cache, const LayerArguments& args,
                           c10::function_ref<void(const Tensor& key, const Tensor& value)> check);

// Query and key of tokens, rotated.
std::tuple<Tensor, Tensor> rotate_tokens(const NewTokens& tokens, const std::optional<RopeSettings>& rope,
                                         const Placement& place);

// A copy of the cache that is differentiable in its new rows, and only in them: [B, Hkv, capacity, D].
Tensor with_new_rows(const Tensor& cache,
                     const Tensor& rows,                      // [B, Hkv, L, D]
                     const Tensor& past,                      // [B], slots in use before the append
                     const std::optional<Tensor>& new_lens);  // [B]

// Numbers that have the values of `rounded` and the gradients of x.
Tensor as_if_exact(const Tensor& x, const Tensor& rounded);

// For calls that return weights. Keeps as many keys as the longest sequence has, or as the mask covers. If tracing
// hides the values, it keeps every position of the cache.
void trim_to_longest(PlacedTokens& tokens, const std::optional<Tensor>& mask);

}  // namespace attnpack
