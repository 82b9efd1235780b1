#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include <attnpack/core/params.h>

namespace attnpack {

// Whether the few-row kernels take these arguments. Everything else goes to linear_formula, which also reports what is
// wrong with the arguments.
bool fits_few_rows(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// The kernels' params, made from arguments that fit, the result, and the tensors that the params point to. The caller
// keeps the weight alive.
struct PreparedLinear {
  LinearParams params{};
  at::Tensor rows, bias;  // contiguous
  at::Tensor out;
};

PreparedLinear prepare_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace attnpack
