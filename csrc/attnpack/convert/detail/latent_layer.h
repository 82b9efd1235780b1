#pragma once

#include <attnpack/convert/detail/latent.h>

#include <map>
#include <string>

namespace attnpack::convert {

// The tensors of MultiHeadLatentAttention with latent_norm and bias, by name, for the attention of a layer that reads
// its input through an RMSNorm. Its scores are those of `scale` under latent attention's own scale. The norm of the
// latents does nothing: each latent has a constant so large that its length is that of the constant, to fp32's rounding
// (for fp16 weights to theirs). So kv_lora_rank counts one more than what makes keys and values. A bias of q_proj needs
// a query latent, which is the input and such a constant.
std::map<std::string, at::Tensor> latent_layer(const AttentionWeights& weights,
                                               const at::Tensor& o_bias,      // [E], or undefined
                                               const at::Tensor& input_norm,  // [E], weight of the norm before
                                               double scale, const LatentOptions& options);

}  // namespace attnpack::convert
