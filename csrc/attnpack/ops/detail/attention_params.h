#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <attnpack/core/head_groups.h>
#include <attnpack/core/params.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/layout.h>

namespace attnpack {

// The kernels' params, made from checked arguments, and the tensors that the params point to.
struct PreparedAttention {
  AttentionParams params{};
  Tensor query, key, value, mask;  // last stride 1 (mask: any)
  Tensor q_offsets, kv_lens;       // int64, contiguous
  Tensor sinks, alibi_slopes;      // fp64, contiguous
  Tensor dropout_seed;             // undefined where params hold the number
  HeadGroups groups;
};

PreparedAttention prepare_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const AttentionArguments& args);

// New tensors for the results of the forward pass of `query`; prepared.params points to them from now on.
AttentionResult make_outputs(PreparedAttention& prepared, const Tensor& query);

// The backward kernels' params, the results, and the tensors that the params point to. The params also point into the
// PreparedAttention that they were made from.
struct PreparedBackward {
  AttentionBackwardParams params{};
  Tensor grad_out, lse;  // as the kernels read them
  Tensor grad_lse;       // of the accumulation type; undefined if there is none
  Tensor delta;          // [batch, heads, q_len]: rowsum(dO * O) - dlse, which all scores of a row share
  Tensor grad_query, grad_key, grad_value;
  Tensor grad_scores;  // zeros; undefined without mask_gradient
};

PreparedBackward prepare_backward(const PreparedAttention& forward, const Tensor& grad_out,
                                  const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const Tensor& out, const Tensor& lse, bool mask_gradient);

// The term that each row adds to the gradient of its head's sink, [batch, heads, q_len].
Tensor sink_terms(const Tensor& sinks, const Tensor& lse, const Tensor& delta);

DType kernel_dtype(at::ScalarType dtype);
Strides kernel_strides(const Tensor& t);   // of a [batch, heads, length, width] tensor
Tensor unit_last_stride(const Tensor& t);  // t itself, or a contiguous copy

}  // namespace attnpack
