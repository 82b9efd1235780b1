#pragma once

#include <attnpack/convert/latent_conversion.h>
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

// A copy of the model with latent attention in every layer. By default all kv heads' rotated keys together are one
// rotating key of width num_kv_heads * head_dim. With kv_lora_rank from 2 * num_kv_heads * head_dim on the outputs are
// then those of model, but for rounding. options.rope_dim keeps that many of the dims that rotate (LatentConversion);
// options.ids is a text, [rows, L], on which the model's own states say what counts. The form is that of DeepSeek-V3:
// one number of each latent is a constant, so large that the norm of the latents does nothing. Raises for a model with
// settings that latent attention cannot hold: norms of queries and keys, soft caps, windows, ...; all are named.
CausalLM to_mla(const CausalLM& model, int64_t kv_lora_rank, const ToMlaOptions& options = {});

// The model with embed_scale, residual_scale and logit_scale in its weights; its outputs are the same.
CausalLM fold_multipliers(const CausalLM& model);

}  // namespace attnpack::convert

namespace attnpack {

using convert::to_mla;
using convert::ToMlaOptions;

}  // namespace attnpack
