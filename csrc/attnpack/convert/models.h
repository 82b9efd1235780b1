#pragma once

#include <attnpack/convert/modules.h>
#include <attnpack/models/causal_lm.h>
#include <attnpack/modules/stack.h>

namespace attnpack::convert {

// A copy of the model with fewer kv heads in every attention layer; options without calibration, which is a single
// layer's. With a seed each layer draws by one of its own.
//
// CausalLM has no head map: query heads are put in the order of their groups, which must come out even.
CausalLM to_gqa(const CausalLM& model, int64_t num_kv_heads, const ToGqaOptions& options = {});

// The decoder's attention to itself and to the encoder; with encoder the encoder's too, whose cost is not that of
// reading a cache (Ainslie et al. 2023, section 3.1).
EncoderDecoder to_gqa(const EncoderDecoder& model, int64_t num_kv_heads, const ToGqaOptions& options = {},
                      bool encoder = false);

}  // namespace attnpack::convert
