#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <tuple>
#include <vector>

namespace attnpack {

using at::Tensor;

// The arguments of a causal convolution after its two tensors, in the order of the schema.
#define ATTNPACK_CAUSAL_CONV1D_SCHEMA                                                                        \
  "Tensor? bias=None, Tensor? initial_state=None, Tensor? kv_lens=None, Tensor? cu_seqlens=None, bool silu=" \
  "False"
struct CausalConv1dArguments {
  std::optional<Tensor> bias, initial_state, kv_lens, cu_seqlens;
  bool silu = false;

  auto members() const { return std::tie(bias, initial_state, kv_lens, cu_seqlens, silu); }
};

using CausalConv1dResult = std::tuple<Tensor, Tensor>;  // out, state
// The gradients of x, weight, bias and initial_state. That of an argument which is not given is an empty tensor [0].
using CausalConv1dGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The ops through the dispatcher.
CausalConv1dResult causal_conv1d_op(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args);
CausalConv1dGradients causal_conv1d_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                const Tensor& x, const Tensor& weight,
                                                const CausalConv1dArguments& args);

void check_causal_conv1d(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args);
void check_causal_conv1d_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_state, const Tensor& x,
                                  const Tensor& weight, const CausalConv1dArguments& args);

// The shape of the state.
std::vector<c10::SymInt> conv_state_shape(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args);

// Tensors as all backends lay them: rows of channels in the order of x, [B, L, C] or stored [B, C, L]; states stored
// [N, K - 1, C].
Tensor empty_rows_as(const Tensor& x);
Tensor laid_as_rows(const Tensor& x, const Tensor& rows);
Tensor empty_conv_state(c10::SymIntArrayRef shape, const at::TensorOptions& options);
Tensor laid_as_conv_state(const Tensor& state);

// The formula in ATen ops, and its gradients, which may be differentiated again. Forward mode, double backward and CUDA
// run them.
CausalConv1dResult causal_conv1d_formula(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args);
CausalConv1dGradients causal_conv1d_backward_formula(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                     const Tensor& x, const Tensor& weight,
                                                     const CausalConv1dArguments& args);

}  // namespace attnpack
