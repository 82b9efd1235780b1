#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/ops/option_list.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>

// The mathematics of recurrent layers after their projections. N: sequences, which are B or those of cu_seqlens. Hk and
// Hv: heads of queries and keys, and of values.
namespace attnpack {

// The inputs of a recurrent layer beside its projected tensors.
struct RecurrentInputs : OptionList<RecurrentInputs> {
  // The states that the layer's last call returned; none: zeros.
  ATTNPACK_OPTION(std::optional<at::Tensor>, conv_state);  // [N, C, K - 1]
  ATTNPACK_OPTION(std::optional<at::Tensor>, state);       // [N, Hv, D, Dv]
  // The new state is written into `state`, and `state` is returned. Not for calls that want gradients.
  ATTNPACK_OPTION(bool, in_place) = false;
  // Valid tokens of each sequence, [B], or where packed sequences begin and end, [N + 1].
  ATTNPACK_OPTION(std::optional<at::Tensor>, kv_lens);
  ATTNPACK_OPTION(std::optional<at::Tensor>, cu_seqlens);
};

// The parameters of a layer of the delta rule.
struct DeltaWeights {
  at::Tensor conv;     // [C, 1, K] for the C channels of q, k and v side by side
  at::Tensor a_log;    // Hv numbers
  at::Tensor dt_bias;  // [Hv], or [Hv * D] for a decay per channel
  at::Tensor norm;     // [Dv]
};
struct DeltaSettings {
  int64_t num_k_heads;
  double eps;                   // of the norm
  std::string gate_activation;  // "silu" or "sigmoid"
  double beta_scale = 1.0;      // 2: the delta rule may turn what the state holds for a key around
};

// Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024) and Kimi Delta Attention (2025): a short convolution with SiLU over
// q, k and v; q and k of length 1; linear attention with the delta rule, where
//   log_decay = -exp(a_log) softplus(decay + dt_bias),  beta = beta_scale sigmoid(beta);
// then RMSNorm over each head, times the activated gate. -> (out [B, L, Hv * Dv], conv_state, state)
std::tuple<at::Tensor, at::Tensor, at::Tensor> delta_attend(const at::Tensor& mixed,  // [B, L, C]
                                                            const at::Tensor& decay,  // [B, L, Hv or Hv * D]
                                                            const at::Tensor& beta,   // [B, L, Hv]
                                                            const at::Tensor& gate,   // [B, L, Hv * Dv]
                                                            const DeltaWeights& weights, const DeltaSettings& settings,
                                                            const RecurrentInputs& inputs = {});

// feature_map: "identity", or "elu", elu(x) + 1 of queries and keys; then each output is divided by the sum of its
// weights (Katharopoulos et al. 2020), and the state has that sum as one more column. decay: "none"; "fixed",
// log(1 - 2^(-5 - h)) for head h (RetNet, Sun et al. 2023); or "learned", a sixteenth of log sigmoid(decay_logits) per
// channel (GLA, Yang et al. 2024).
struct LinearAttendSettings {
  int64_t num_heads;
  std::string feature_map = "identity", decay = "none";
  std::optional<double> scale;  // default 1 / sqrt(D); 1 with a feature map
};
// Raises for a word that is none of these.
void check_linear_attend(std::string_view feature_map, std::string_view decay);

// Linear attention of projected heads. -> (out [B, L, H * Dv], state)
std::tuple<at::Tensor, at::Tensor> linear_attend(const at::Tensor& query,                        // [B, L, H * D]
                                                 const at::Tensor& key,                          // [B, L, H * D]
                                                 const at::Tensor& value,                        // [B, L, H * Dv]
                                                 const std::optional<at::Tensor>& decay_logits,  // [B, L, H * D]
                                                 const LinearAttendSettings& settings,
                                                 const RecurrentInputs& inputs = {});

// The parameters of a layer of Mamba-2.
struct StateSpaceWeights {
  at::Tensor conv;                      // [C, 1, K] for the C channels of values, keys and queries side by side
  std::optional<at::Tensor> conv_bias;  // [C]
  at::Tensor a_log, dt_bias, skip;      // [H]
  at::Tensor norm;                      // [H * Dv]
};
struct StateSpaceSettings {
  int64_t num_groups;  // heads of keys and queries
  double eps;          // of the norm
};

// Mamba-2 (Dao and Gu 2024): a short convolution with SiLU over values x, keys and queries (B and C in the paper);
// linear attention with the values dt * x, where
//   dt = softplus(dt + dt_bias),  log_decay = -exp(a_log) dt,  scale = 1;
// then skip * x is added, the sum is multiplied by silu(gate), and RMSNorm is over each of num_groups parts.
// mixed has gate, values, keys, queries and dt side by side. -> (out [B, L, H * Dv], conv_state, state)
std::tuple<at::Tensor, at::Tensor, at::Tensor> state_space_attend(const at::Tensor& mixed,  // [B, L, H * Dv + C + H]
                                                                  const StateSpaceWeights& weights,
                                                                  const StateSpaceSettings& settings,
                                                                  const RecurrentInputs& inputs = {});

// LFM2's layer: out = c * conv(b * x) of b, c and x side by side. -> (out [B, L, E], conv_state)
std::tuple<at::Tensor, at::Tensor> gated_convolution(const at::Tensor& mixed,                // [B, L, 3 * E]
                                                     const at::Tensor& weight,               // [E, 1, K]
                                                     const std::optional<at::Tensor>& bias,  // [E]
                                                     const RecurrentInputs& inputs = {});

}  // namespace attnpack
