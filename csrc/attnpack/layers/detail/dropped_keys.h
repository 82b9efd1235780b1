#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include <attnpack/layers/detail/layer_arguments.h>
#include <attnpack/layers/detail/place_tokens.h>
#include <attnpack/ops/detail/kv_window.h>

// Attention over a cache that has dropped positions (ops/detail/kv_window.h).
namespace attnpack {

// The positions [B, 1, L, 1] of new tokens behind sequences of these lengths [B].
Tensor new_positions(const Tensor& lengths, const c10::SymInt& count);

// Raises unless the layer sees nothing that the cache may have dropped: it is causal, and has a window (left, 0) that
// is no wider than the cache's.
void check_window_fits(const CacheTensors& cache, const AttentionArguments& args);

// The part of a mask over all positions, broadcastable to [B, Hq, L, positions], that covers the cache's slots. A mask
// may cover more positions than the sequences have.
Tensor mask_of_slots(const Tensor& mask, const CacheTensors& cache);

// Attention over the slots, and over the kept first positions before each query's window: out [B, Hq, L, Dv] and lse
// [B, Hq, L]. args: those of a call over all slots.
AttentionResult attend_first_and_window(const PlacedTokens& tokens, const CacheTensors& cache,
                                        const AttentionArguments& args);

// Its probabilities, [B, Hq, L, slots].
Tensor first_and_window_probabilities(const PlacedTokens& tokens, const CacheTensors& cache,
                                      const AttentionArguments& args);

}  // namespace attnpack
