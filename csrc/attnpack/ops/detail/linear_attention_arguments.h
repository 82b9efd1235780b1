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

using LinearAttentionResult = std::tuple<Tensor, Tensor>;  // out, state
// The gradients of query, key, value, log_decay, beta and initial_state. That of an argument which is not given is an
// empty tensor [0].
using LinearAttentionGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The ops through the dispatcher.
LinearAttentionResult linear_attention_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const LinearAttentionArguments& args);
LinearAttentionGradients linear_attention_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                      const Tensor& query, const Tensor& key, const Tensor& value,
                                                      const LinearAttentionArguments& args);

void check_linear_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                            const LinearAttentionArguments& args);
void check_linear_attention_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                     const Tensor& query, const Tensor& key, const Tensor& value,
                                     const LinearAttentionArguments& args);

// The shape of the state, and of out.
std::vector<c10::SymInt> linear_state_shape(const Tensor& query, const Tensor& value,
                                            const LinearAttentionArguments& args);
std::vector<c10::SymInt> linear_out_shape(const Tensor& query, const Tensor& value);
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
