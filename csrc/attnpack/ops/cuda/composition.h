#pragma once

#include <attnpack/ops/detail/attention_arguments.h>

// The ops as compositions of ATen ops: slower, and with the scores in memory. CUDA tensors run through them where
// libattnpack_cuda is not loaded or cannot run.
namespace attnpack {

AttentionResult attention_composed(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const AttentionArguments& args);
AttentionGradients attention_backward_composed(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                               const Tensor& query, const Tensor& key, const Tensor& value,
                                               const AttentionArguments& args, bool mask_gradient, bool sinks_gradient);
// Positions beyond the capacity are dropped, so that no call waits for the device.
void kv_cache_append_composed(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                              const Tensor& key, const Tensor& value, const std::optional<Tensor>& new_lens);
// Rotates, then appends, by the ops for these steps: it has no kernel of its own.
Tensor kv_cache_append_rotated_composed(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                        const Tensor& query, const Tensor& key, const Tensor& value,
                                        at::ArrayRef<double> inv_freq, double factor, bool interleaved,
                                        const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit);

}  // namespace attnpack
