#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <attnpack/layers/detail/layer_arguments.h>

// Attention over a cache in pages (cache/paged_cache.h).
namespace attnpack {

// The projected tokens of a layer, before rotation: [B, Hq, L, D], [B, Hkv, L, D] and [B, Hkv, L, Dv].
struct LayerTokens {
  Tensor query, key, value;
};

// Whether attend_pages can serve the call: it takes no mask, no named keys, no dropout, no gradients and no keys
// that are stored before rotation.
bool reads_pages(const LayerTokens& tokens, const LayerArguments& layer, const KeyChoice& choice,
                 const ScoreRules& rules);

// Rotates, appends to the pages, and attends to them where they are: out [B, L, Hq * Dv].
Tensor attend_pages(const LayerTokens& tokens, const CacheTensors& cache, const LayerArguments& layer,
                    const ScoreRules& rules);

// For the other calls: runs `call` on a copy of the pages in one piece, with room for the new tokens, and stores in the
// pages what it has appended.
void through_copy(const LayerTokens& tokens, const CacheTensors& cache, const LayerArguments& layer,
                  c10::function_ref<void(const CacheTensors& copy)> call);

}  // namespace attnpack
