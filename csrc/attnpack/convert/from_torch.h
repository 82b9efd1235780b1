#pragma once

#include <attnpack/modules/attention/grouped_attention.h>
#include <attnpack/modules/block.h>
#include <attnpack/modules/stack.h>

namespace torch::nn {
class MultiheadAttentionImpl;
class TransformerEncoderLayerImpl;
class TransformerDecoderLayerImpl;
class TransformerEncoderImpl;
class TransformerDecoderImpl;
class TransformerImpl;
}  // namespace torch::nn

namespace attnpack::convert {

// Layers and stacks of torch::nn as attnpack's, with copies of their weights, their dropout, mode, dtype, device and
// requires_grad. The outputs are the same but for rounding, and these habits differ:
//   shapes    attnpack's tensors are [B, L, E]; those of torch::nn are [L, B, E]. Transpose the first two dims.
//   masks     true means "may attend". In torch::nn true in key_padding_mask means "hide". Give kv_lens, or
//             mask = ~key_padding_mask as [B, 1, 1, L].
//   attn_mask Float masks are the same. torch::nn in C++ adds a bool attn_mask to the scores as 0 and 1, so that it
//             hides nothing (pytorch#80494). Here a bool mask hides where it is false.
//   causality a DecoderBlock is causal; torch's decoder layer is if it is given a causal tgt_mask.
//   weights   of forward_with_weights are those of each head; torch's are their mean.
// Dropout draws other numbers in training.

// Raises for add_bias_kv and add_zero_attn, which attnpack does not have.
MultiHeadAttention from_torch(const torch::nn::ModuleHolder<torch::nn::MultiheadAttentionImpl>& module);

// With LayerNorm, and norm(x + f(x)) as in C++'s torch. Raises for an activation that is neither ReLU nor GELU.
EncoderBlock from_torch(const torch::nn::ModuleHolder<torch::nn::TransformerEncoderLayerImpl>& module);

// The same with cross-attention, torch's multihead_attn, and its context, torch's memory.
DecoderBlock from_torch(const torch::nn::ModuleHolder<torch::nn::TransformerDecoderLayerImpl>& module);

// Stacks of these layers. Raises for a norm that is no LayerNorm with a weight.
Encoder from_torch(const torch::nn::ModuleHolder<torch::nn::TransformerEncoderImpl>& module);
Decoder from_torch(const torch::nn::ModuleHolder<torch::nn::TransformerDecoderImpl>& module);
EncoderDecoder from_torch(const torch::nn::ModuleHolder<torch::nn::TransformerImpl>& module);

}  // namespace attnpack::convert
