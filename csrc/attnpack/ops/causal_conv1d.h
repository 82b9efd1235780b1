#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/arg.h>

#include <optional>
#include <string>
#include <tuple>

namespace attnpack {

// The options of a causal convolution. N: sequences, which are B or those of cu_seqlens. K: the taps of a channel.
struct CausalConv1dOptions {
  TORCH_ARG(std::optional<at::Tensor>, bias);  // [C]
  // The function that is applied to the results: "silu", or none.
  TORCH_ARG(std::optional<std::string>, activation);
  // The K - 1 inputs before the first tokens, the last one last, [N, C, K - 1]. None: zeros.
  TORCH_ARG(std::optional<at::Tensor>, initial_state);
  // Tokens of each sequence, int32 or int64 [B]. Those after them give 0 and leave the state alone.
  TORCH_ARG(std::optional<at::Tensor>, kv_lens);
  // Packed sequences, one after the other in a batch of one: where each begins, and the end, int32 or int64 [N + 1].
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens);
};

// The short convolution of recurrent layers (Mamba, Gu and Dao 2023, section 3.4): each channel by itself, over a token
// and the K - 1 tokens before it:
//   out_t = act(bias + sum over j of weight_j x_(t - K + 1 + j))
// fp64, fp32, bf16 or fp16; weight and bias of any float dtype. Errors: c10::Error that names the argument.
at::Tensor causal_conv1d(const at::Tensor& x,                       // [B, L, C]
                         const at::Tensor& weight,                  // [C, K]
                         const CausalConv1dOptions& options = {});  // -> [B, L, C]

// The same, and the last K - 1 inputs of each sequence, which the next call takes as its initial_state: (out, state
// [N, C, K - 1]). The state is stored [N, K - 1, C], so that a step reads and writes whole rows.
std::tuple<at::Tensor, at::Tensor> causal_conv1d_with_state(const at::Tensor& x, const at::Tensor& weight,
                                                            const CausalConv1dOptions& options = {});

}  // namespace attnpack
