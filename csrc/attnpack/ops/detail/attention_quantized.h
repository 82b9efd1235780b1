#pragma once

#include <attnpack/ops/attention.h>
#include <attnpack/ops/detail/attention_arguments.h>

namespace attnpack {

// Attention over quantised keys and values (ops/quantize.h). On the CPU few rows read them as they are stored, widened
// in registers; else they are expanded for the time of the call. Gradients flow only into query, mask and sinks.
AttentionResult attention_quantized(const at::Tensor& query,  // [B, Hq, Lq, D]
                                    const at::Tensor& key,    // [B, Hkv, Lkv, bytes of D numbers] uint8
                                    const at::Tensor& value,  // [B, Hkv, Lkv, bytes of Dv numbers] uint8
                                    int64_t bits,             // 8 or 4
                                    const c10::SymInt& v_head_dim, const AttentionArguments& args);

void check_attention_quantized(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t bits,
                               const c10::SymInt& v_head_dim, const AttentionArguments& args);

// Expands keys and values.
AttentionResult attention_quantized_formula(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                            int64_t bits, const c10::SymInt& v_head_dim,
                                            const AttentionArguments& args);

// A tensor of the shape and the dtype that dequantised rows would have, with memory for one row.
at::Tensor stand_in(const at::Tensor& rows, const at::Tensor& query, const c10::SymInt& dim);

}  // namespace attnpack
