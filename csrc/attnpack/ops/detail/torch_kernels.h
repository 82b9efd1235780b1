#pragma once

#include <string>
#include <utility>
#include <vector>

#include <attnpack/ops/detail/attention_arguments.h>

// torch's own CUDA kernels, for plain calls in 16 bits where a table says that they are faster than ours. A call is
// plain if it has no rule but causality, from the first key on. Everything else runs on our kernels. The gradients of
// torch's kernels are sums by atomic additions, so they have not the same bits each time.
namespace attnpack {

struct CudaKernels;  // ops/cuda/kernels/table.h

// Which kernels plain calls run. kFastest, unless the environment says ATTNPACK_CUDA=own, or torch is to use
// deterministic algorithms.
enum class CudaChoice { kOwn, kFastest };
CudaChoice cuda_choice();
std::string describe_cuda_choice();

// The properties of a call on which the choice depends, besides the environment.
struct TorchCall {
  int capability;    // 10 * major + minor
  int64_t head_dim;  // also of the values
  int64_t rows;      // of a kv head: queries times members of its group
  bool gradients;    // whether there are, or will be, gradients
};
// Whether F.scaled_dot_product_attention is faster than the operator.
bool sdpa_is_faster(const TorchCall& call);

// Whether torch's kernels take such a call. Then `call` says what the table asks for.
bool is_plain_call(const CudaKernels& kernels, const Tensor& query, const Tensor& key, const Tensor& value,
                   const AttentionArguments& args, TorchCall* call);

// The results by torch's kernel, or nothing where ours are to run: by the table, or because torch's kernel refuses.
std::optional<AttentionResult> attend_by_torch(const CudaKernels& kernels, const Tensor& query, const Tensor& key,
                                               const Tensor& value, const AttentionArguments& args);
std::optional<AttentionGradients> differentiate_by_torch(const CudaKernels& kernels, const Tensor& grad_out,
                                                         const std::optional<Tensor>& grad_lse, const Tensor& query,
                                                         const Tensor& key, const Tensor& value, const Tensor& out,
                                                         const Tensor& lse, const AttentionArguments& args);

// The operator's calls since the last reset that torch's kernels ran, or refused, by name.
std::vector<std::pair<std::string, int64_t>> torch_kernel_report();
void reset_torch_kernel_report();

}  // namespace attnpack
