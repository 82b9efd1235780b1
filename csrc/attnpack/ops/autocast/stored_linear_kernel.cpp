#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <attnpack/ops/stored_linear.h>

namespace attnpack {
namespace {

using at::Tensor;

// As torch's linear: input and bias in autocast's dtype.
template <typename X>
auto cast_stored(const X& x) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCPU), x, at::kCPU);
}

Tensor stored_linear_autocast(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                              std::optional<bool> round_input) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastCPU);
  return stored_linear(cast_stored(input), weight, cast_stored(bias), round_input);
}

std::vector<Tensor> stored_linears_autocast(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastCPU);
  return stored_linears(cast_stored(input), weights, cast_stored(biases));
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, AutocastCPU, m) {
  m.impl("stored_linear", attnpack::stored_linear_autocast);
  m.impl("stored_linears", attnpack::stored_linears_autocast);
}
