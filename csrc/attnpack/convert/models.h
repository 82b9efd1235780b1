#pragma once

#include <attnpack/convert/modules.h>
#include <attnpack/models/causal_lm.h>
#include <attnpack/modules/stack.h>

namespace attnpack::convert {

// A copy of the model with fewer kv heads in every attention layer. options have no calibration, which belongs to a
// single layer. With a seed each layer draws by a seed of its own.
//
// CausalLM has no head map: query heads are put in the order of their groups, and groups must be even.
CausalLM to_gqa(const CausalLM& model, int64_t num_kv_heads, const ToGqaOptions& options = {});

// Converts the decoder's attention to itself and to the encoder. With encoder it converts the encoder's attention too,
// whose cost is not that of reading a cache (Ainslie et al. 2023, section 3.1).
EncoderDecoder to_gqa(const EncoderDecoder& model, int64_t num_kv_heads, const ToGqaOptions& options = {},
                      bool encoder = false);

}  // namespace attnpack::convert
