#pragma once

#include <attnpack/backend/detail/replaceable.h>

namespace attnpack {

// Registers the kernels of torch's fused multi-head attention, which nn.MultiheadAttention and nn.TransformerEncoder
// call in eval mode instead of scaled_dot_product_attention.
void register_native_mha(Registrations& registrations);

}  // namespace attnpack
