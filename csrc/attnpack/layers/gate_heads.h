#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace attnpack {

// The heads' outputs times f(gate), before the output projection (Qiu et al. 2025, arXiv 2505.06708). f is "sigmoid",
// or "softplus", ln(1 + e^g).
at::Tensor gate_heads(const at::Tensor& joined,  // [B, L, H * D]
                      const at::Tensor& gate,    // [B, L, H], one number per head, or [B, L, H * D]
                      int64_t num_heads, const std::string& activation);  // -> [B, L, H * D], in joined's dtype

// Checks the name of a gate's activation.
void check_gate_activation(const std::string& activation);

}  // namespace attnpack
