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
// Adds counts [B] to lengths [B], up to a full cache.
void add_up_to_capacity(const Tensor& lengths, const Tensor& counts, int64_t capacity,
                        const std::optional<Tensor>& dropped);
// Positions beyond the capacity are dropped, so that no call waits for the device.
void kv_cache_append_composed(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                              const Tensor& key, const Tensor& value, const std::optional<Tensor>& new_lens,
                              const std::optional<Tensor>& dropped = std::nullopt);
// Rotates, then appends, by the ops for these steps: it has no kernel of its own.
Tensor kv_cache_append_rotated_composed(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                        const Tensor& query, const Tensor& key, const Tensor& value,
                                        at::ArrayRef<double> inv_freq, double factor, bool interleaved,
                                        const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit,
                                        const std::optional<Tensor>& dropped = std::nullopt);
std::tuple<Tensor, Tensor, Tensor> kv_window_slide_composed(const Tensor& key, const Tensor& value,
                                                            const Tensor& lengths, const Tensor& dropped,
                                                            c10::SymInt capacity, int64_t window, int64_t keep_first);

}  // namespace attnpack
