#pragma once

#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/varlen_arguments.h>

// The ops for CUDA tensors that launch kernels of libattnpack_cuda. Host tests call them on CPU tensors, with a table
// of emulated kernels (tests/cpp/support/emulated_kernels.h).
namespace attnpack {

AttentionResult attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                               const AttentionArguments& args);
AttentionGradients attention_backward_cuda(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                           const Tensor& query, const Tensor& key, const Tensor& value,
                                           const Tensor& out, const Tensor& lse, const AttentionArguments& args,
                                           bool mask_gradient, bool sinks_gradient);
AttentionResult attention_varlen_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& cu_seqlens_q, const VarlenArguments& args);
VarlenGradients attention_varlen_backward_cuda(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                               const Tensor& query, const Tensor& key, const Tensor& value,
                                               const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                               const VarlenArguments& args, bool sinks_gradient);
AttentionResult attention_quantized_cuda(const Tensor& query, const Tensor& key, const Tensor& value, int64_t bits,
                                         c10::SymInt v_head_dim, const AttentionArguments& args);
void kv_cache_append_cuda(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                          const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit,
                          const std::optional<Tensor>& dropped);
Tensor kv_cache_append_rotated_cuda(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                    const Tensor& query, const Tensor& key, const Tensor& value,
                                    at::ArrayRef<double> inv_freq, double factor, bool interleaved,
                                    const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit,
                                    const std::optional<Tensor>& dropped);
void kv_cache_append_paged_cuda(const Tensor& key_pool, const Tensor& value_pool, const Tensor& block_table,
                                const Tensor& lengths, const Tensor& key, const Tensor& value,
                                const std::optional<Tensor>& new_lens, const std::optional<Tensor>& cu_seqlens);
Tensor quantize_rows_cuda(const Tensor& x, int64_t bits);
Tensor dequantize_rows_cuda(const Tensor& rows, int64_t bits, c10::SymInt dim, at::ScalarType dtype);

}  // namespace attnpack
