#pragma once

#include <attnpack/ops/cuda/device_constants.h>
#include <attnpack/ops/cuda/target.h>
#include <attnpack/ops/detail/attention_params.h>

namespace attnpack {

struct CudaAttention {
  PreparedAttention prepared;
  int64_t most_group;  // the size of the largest group of query heads that share a kv head
};

// The params of a call, with all that they point to on the device. args: checked.
CudaAttention prepare_cuda_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const AttentionArguments& args);

// Launches the forward kernels. query: laid out as the result is to be.
AttentionResult run_cuda_forward(const CudaKernels& kernels, CudaAttention& call, const Tensor& query);

// Launches the backward kernels, which write into r.
void run_cuda_backward(const CudaKernels& kernels, const CudaAttention& call, PreparedBackward& r, const Tensor& query);

// The gradient of the sinks, by the terms of all rows.
Tensor grad_of_sinks(const Tensor& sinks, const Tensor& lse, const Tensor& delta);

// The kernels count rows, heads and keys in 32 bits, but not elements.
bool countable(const Tensor& query, int64_t kv_len);

}  // namespace attnpack
