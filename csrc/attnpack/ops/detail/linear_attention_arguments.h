#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <tuple>
#include <vector>

namespace attnpack {

using at::Tensor;

// The arguments of linear attention after its three tensors, in the order of the schema.
#define ATTNPACK_LINEAR_ATTENTION_SCHEMA                                                                             \
  "Tensor? log_decay=None, Tensor? beta=None, Tensor? initial_state=None, Tensor? kv_lens=None, Tensor? cu_seqlens=" \
  "None, float? scale=None"
struct LinearAttentionArguments {
  std::optional<Tensor> log_decay, beta, initial_state, kv_lens, cu_seqlens;
  std::optional<double> scale;

  auto members() const { return std::tie(log_decay, beta, initial_state, kv_lens, cu_seqlens, scale); }
};

// The same where the state is a tensor of the caller, which is written.
#define ATTNPACK_OWNED_STATE_SCHEMA \
  "Tensor? log_decay=None, Tensor? beta=None, Tensor? kv_lens=None, Tensor? cu_seqlens=None, float? scale=None"
struct OwnedStateArguments {
  std::optional<Tensor> log_decay, beta, kv_lens, cu_seqlens;
  std::optional<double> scale;

  auto members() const { return std::tie(log_decay, beta, kv_lens, cu_seqlens, scale); }
  LinearAttentionArguments from(const Tensor& state) const {
    return {log_decay, beta, state, kv_lens, cu_seqlens, scale};
  }
};

using LinearAttentionResult = std::tuple<Tensor, Tensor>;  // out, state
// The gradients of query, key, value, log_decay, beta and initial_state. That of an argument which is not given is an
// empty tensor [0].
using LinearAttentionGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The ops through the dispatcher.
LinearAttentionResult linear_attention_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const LinearAttentionArguments& args);
Tensor linear_attention_in_place_op(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state,
                                    const OwnedStateArguments& args);
LinearAttentionGradients linear_attention_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                      const Tensor& query, const Tensor& key, const Tensor& value,
                                                      const LinearAttentionArguments& args);

void check_linear_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                            const LinearAttentionArguments& args);
// The same, and that state may be written: its dtype, and memory of its own.
void check_linear_attention_in_place(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state,
                                     const OwnedStateArguments& args);
void check_linear_attention_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                     const Tensor& query, const Tensor& key, const Tensor& value,
                                     const LinearAttentionArguments& args);

// The shape of the state, and of out.
std::vector<c10::SymInt> linear_state_shape(const Tensor& query, const Tensor& value,
                                            const LinearAttentionArguments& args);
std::vector<c10::SymInt> linear_out_shape(const Tensor& query, const Tensor& value);
// By linear_attention and a copy into the state, for backends and transforms without a kernel that writes it.
Tensor linear_attention_by_copy(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state,
                                const OwnedStateArguments& args);
double linear_scale(const Tensor& query, const LinearAttentionArguments& args);

// The formula in ATen ops, in chunks, and its gradients, which may be differentiated again. Forward mode, double
// backward and CUDA run them.
LinearAttentionResult linear_attention_formula(const Tensor& query, const Tensor& key, const Tensor& value,
                                               const LinearAttentionArguments& args);
LinearAttentionGradients linear_attention_backward_formula(const Tensor& grad_out,
                                                           const std::optional<Tensor>& grad_state, const Tensor& query,
                                                           const Tensor& key, const Tensor& value,
                                                           const LinearAttentionArguments& args);

}  // namespace attnpack
