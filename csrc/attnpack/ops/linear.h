#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace attnpack {

// input weight^T + bias, as torch's linear. On the CPU, up to 16 rows of input without gradients, as in decoding,
// stream the weight at the speed of memory. More rows take torch's linear or oneDNN, whichever is faster
// (ops/detail/onednn_linear.h); the environment variable ATTNPACK_LINEAR ("torch", "onednn") pins one. It is a
// template, so that an unqualified call that finds at::linear too takes at::linear. Two plain functions would be
// ambiguous.
template <typename = void>
at::Tensor linear(const at::Tensor& input,                      // [..., in]
                  const at::Tensor& weight,                     // [out, in]
                  const std::optional<at::Tensor>& bias = {});  // [out] -> [..., out]

// `linear` of one input by several weights. The weights are streamed in one go.
std::vector<at::Tensor> linears(const at::Tensor& input,      // [..., in]
                                at::TensorList weights,       // each [out, in]
                                at::TensorList biases = {});  // none, or one each [out] -> each [..., out]

// Raises on shapes and devices that do not fit.
void check_linear_shapes(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// The same by torch's linear, with its derivatives. Raises on arguments that do not fit.
at::Tensor linear_formula(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);
std::vector<at::Tensor> linears_formula(const at::Tensor& input, at::TensorList weights, at::TensorList biases);

// `linears` by one call of `one` per weight.
using OneLinear = at::Tensor(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);
std::vector<at::Tensor> each_linear(OneLinear* one, const at::Tensor& input, at::TensorList weights,
                                    at::TensorList biases);

// The fewest inputs of a layer for which the kernel of few rows runs: shorter sums are faster in torch's linear.
constexpr int64_t kFewRowsInputs = 32;

}  // namespace attnpack
