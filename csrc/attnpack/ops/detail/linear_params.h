#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include <attnpack/core/params.h>

namespace attnpack {

// What the few-row kernels take; everything else is linear_formula, which also says what is wrong with it.
bool fits_few_rows(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// The kernels' params of arguments that fit, with the result and what else their pointers need kept alive beside the
// weight.
struct PreparedLinear {
  LinearParams params{};
  at::Tensor rows, bias;  // contiguous
  at::Tensor out;
};

PreparedLinear prepare_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace attnpack
