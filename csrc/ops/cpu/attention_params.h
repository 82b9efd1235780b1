#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <attnpack/core/head_map.h>
#include <attnpack/core/params.h>
#include <attnpack/ops/attention_args.h>
#include <attnpack/ops/layout.h>

namespace attnpack {

// The kernels' params from checked arguments, with what the params' pointers need kept alive beside them.
struct PreparedAttention {
  AttentionParams params{};
  Tensor query, key, value, mask;  // last stride 1 (mask: any)
  Tensor q_offsets, kv_lens;       // int64, contiguous
  Tensor sinks, alibi_slopes;      // fp64, contiguous
  HeadGroups groups;
};

PreparedAttention prepare_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    ATTNPACK_ATTENTION_PARAMS);

DType kernel_dtype(at::ScalarType dtype);
Strides kernel_strides(const Tensor& t);   // of a [batch, heads, length, width] tensor
Tensor unit_last_stride(const Tensor& t);  // t itself, or a contiguous copy

}  // namespace attnpack
