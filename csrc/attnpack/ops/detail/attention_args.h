#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <tuple>

// The arguments that follow query, key, value in every schema of the family, once: their types, and their names.
// q_offsets [B] takes the place of q_offset; "end" has been resolved before the op; dropout_seed is drawn outside it.
#define ATTNPACK_ATTENTION_PARAMS                                                                                     \
  const std::optional<at::Tensor>&mask, bool causal, c10::SymInt q_offset, const std::optional<at::Tensor>&q_offsets, \
      int64_t window_left, int64_t window_right, const std::optional<at::Tensor>&kv_lens, double softcap,             \
      const std::optional<at::Tensor>&sinks, const std::optional<at::Tensor>&alibi_slopes,                            \
      at::OptionalIntArrayRef head_map, double dropout_p, const std::optional<at::Tensor>&dropout_seed,               \
      std::optional<double> scale

#define ATTNPACK_ATTENTION_ARGS                                                                                  \
  mask, causal, q_offset, q_offsets, window_left, window_right, kv_lens, softcap, sinks, alibi_slopes, head_map, \
      dropout_p, dropout_seed, scale

#define ATTNPACK_ATTENTION_SCHEMA                                                                              \
  "Tensor? mask, bool causal, SymInt q_offset, Tensor? q_offsets, int window_left, int window_right, Tensor? " \
  "kv_lens, float softcap, Tensor? sinks, Tensor? alibi_slopes, int[]? head_map, float dropout_p, Tensor? "    \
  "dropout_seed, float? scale"

namespace attnpack {

using at::Tensor;

// out and lse; gradients of query, key, value, mask, sinks (empty where they were not asked for).
using AttentionResult = std::tuple<Tensor, Tensor>;
using AttentionGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// The ops, through the dispatcher.
AttentionResult attention_op(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTENTION_PARAMS);
AttentionGradients attention_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                         const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                                         const Tensor& lse, ATTNPACK_ATTENTION_PARAMS, bool mask_gradient,
                                         bool sinks_gradient);

// Shapes, dtypes, devices and settings, for every backend.
void check_attention(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTENTION_PARAMS);
// The part of it that a layer asks before it writes its cache; the seed is drawn later.
void check_dropout(double dropout_p);
// The same for the backward pass, and what it takes of the forward pass.
void check_attention_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query,
                              const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                              ATTNPACK_ATTENTION_PARAMS, bool mask_gradient, bool sinks_gradient);
// The values of kv_lens, where reading them does not wait for a device.
void check_kv_lens_values(const int64_t* kv_lens, int64_t batch, int64_t kv_len);

// The plain differentiable formula, by ATen alone: what torch.func transforms and devices without a kernel run.
AttentionResult attention_formula(const Tensor& query, const Tensor& key, const Tensor& value,
                                  ATTNPACK_ATTENTION_PARAMS);
Tensor scores_formula(const Tensor& query, const Tensor& key, ATTNPACK_ATTENTION_PARAMS, c10::string_view stage);

}  // namespace attnpack
