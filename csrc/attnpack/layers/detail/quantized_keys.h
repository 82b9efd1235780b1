#pragma once

#include <attnpack/layers/detail/layer_arguments.h>
#include <attnpack/ops/kv_cache.h>

// A layer over a cache of quantised rows (cache/quantized_cache.h).
namespace attnpack {

// Rotates, quantises and appends, and attends: out [B, Hq, L, Dv]; with need_weights the probabilities before dropout
// too, [B, Hq, L, keys]. Everything is checked before the cache is written. The new positions are read as they are
// stored; gradients flow through them as if they were exact, and through no earlier ones.
std::tuple<Tensor, Tensor> attend_quantized(const Tensor& query,  // [B, Hq, L, D], before rotation
                                            const Tensor& key,    // [B, Hkv, L, D], before rotation
                                            const Tensor& value,  // [B, Hkv, L, Dv]
                                            const CacheTensors& cache, const LayerArguments& layer,
                                            const ScoreRules& rules, bool need_weights);

}  // namespace attnpack
