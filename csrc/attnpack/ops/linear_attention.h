#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/arg.h>

#include <optional>
#include <tuple>

namespace attnpack {

// The options of linear attention. B: batch. Hk, Hv: heads of query and key, and of values. N: sequences, which are B
// or those of cu_seqlens.
struct RecurrenceOptions {
  // The log of what is kept of the state, at most 0: [B, Hv, L], or [B, Hv, L, D] for each channel. None: all is kept.
  TORCH_ARG(std::optional<at::Tensor>, log_decay);
  // How much of the difference from what the state holds for a key is written, [B, Hv, L]. None: values are added.
  TORCH_ARG(std::optional<at::Tensor>, beta);
  // The states before the first tokens, [N, Hv, D, Dv]. None: zeros.
  TORCH_ARG(std::optional<at::Tensor>, initial_state);
  // Tokens of each sequence, int32 or int64 [B]. Those after them give 0 and leave the state alone.
  TORCH_ARG(std::optional<at::Tensor>, kv_lens);
  // Packed sequences, one after the other in a batch of one: where each begins, and the end, int32 or int64 [N + 1].
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens);
  // Default 1 / sqrt(D).
  TORCH_ARG(std::optional<double>, scale);
};

// Linear attention with decay and the delta rule. For each value head h, which reads key head h / (Hv / Hk):
//   S <- exp(log_decay_t) S,  d_t = beta_t (v_t - S^T k_t), or v_t without beta,  S <- S + k_t d_t^T,  o_t = scale S^T
//   q_t
// (Katharopoulos et al. 2020; delta rule: Yang et al. 2024, arXiv 2406.06484; with decay: arXiv 2412.06464; decay per
// channel: Kimi Linear 2025.) fp64, fp32, bf16 or fp16; log_decay, beta and states of any float dtype. Decays that
// underflow are exact zeros. Errors: c10::Error that names the argument.
at::Tensor linear_attention(const at::Tensor& query,                 // [B, Hk, L, D]
                            const at::Tensor& key,                   // [B, Hk, L, D]
                            const at::Tensor& value,                 // [B, Hv, L, Dv]
                            const RecurrenceOptions& options = {});  // -> [B, Hv, L, Dv]

// The same, and the states after the last tokens: (out, state [N, Hv, D, Dv] in fp32, fp64 for fp64 inputs).
std::tuple<at::Tensor, at::Tensor> linear_attention_with_state(const at::Tensor& query, const at::Tensor& key,
                                                               const at::Tensor& value,
                                                               const RecurrenceOptions& options = {});

// The same for states that the caller owns: the states before the first tokens are read from `state`, and those after
// the last tokens are written there. A call that raises has written nothing. It has no gradient: it raises for a tensor
// that wants one. options.initial_state stays none.
at::Tensor linear_attention_(const at::Tensor& query,                 // [B, Hk, L, D]
                             const at::Tensor& key,                   // [B, Hk, L, D]
                             const at::Tensor& value,                 // [B, Hv, L, Dv]
                             const at::Tensor& state,                 // [N, Hv, D, Dv] in fp32, fp64 for fp64 inputs
                             const RecurrenceOptions& options = {});  // -> [B, Hv, L, Dv]

}  // namespace attnpack
