#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <attnpack/ops/detail/causal_conv1d_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

// Casts x to autocast's dtype. Weight and bias stay as they are, because they are read in fp32.
template <c10::DispatchKey Key, c10::DeviceType Device>
CausalConv1dResult causal_conv1d_autocast(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(Key);
  return causal_conv1d_op(at::autocast::cached_cast(at::autocast::get_autocast_dtype(Device), x, Device), weight, args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, AutocastCPU, m) {
  m.impl("causal_conv1d",
         attnpack::from_schema<attnpack::causal_conv1d_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>>);
}
TORCH_LIBRARY_IMPL(attnpack, AutocastCUDA, m) {
  m.impl("causal_conv1d",
         attnpack::from_schema<attnpack::causal_conv1d_autocast<c10::DispatchKey::Autocast, at::kCUDA>>);
}
