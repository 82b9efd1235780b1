#pragma once

#include <attnpack/ops/cuda/kernels/table.h>
#include <attnpack/ops/detail/attention_params.h>

namespace attnpack {

// The params that all appends share: sizes of rows, pointers and lengths. Strides and sizes of the cache are missing.
PlaceParams place_params(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                         const Tensor& value);

}  // namespace attnpack
