#pragma once

#include <torch/library.h>

#include <memory>
#include <vector>

namespace attnpack {

// Registers the kernels of torch's fused multi-head attention, which nn.MultiheadAttention and nn.TransformerEncoder
// call in eval mode instead of scaled_dot_product_attention.
void register_native_mha(std::vector<std::unique_ptr<torch::Library>>& registrations);

}  // namespace attnpack
