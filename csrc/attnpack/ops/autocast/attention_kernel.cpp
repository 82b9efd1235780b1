#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

// Casts query, key and value to autocast's dtype. mask, sinks and slopes stay as they are, because they are read in
// fp32.
template <c10::DispatchKey Key, c10::DeviceType Device>
AttentionResult attention_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const AttentionArguments& args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(Key);
  const auto dtype = at::autocast::get_autocast_dtype(Device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, Device); };
  return attention_op(cast(query), cast(key), cast(value), args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, AutocastCPU, m) {
  m.impl("attention", attnpack::from_schema<attnpack::attention_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>>);
}
TORCH_LIBRARY_IMPL(attnpack, AutocastCUDA, m) {
  m.impl("attention", attnpack::from_schema<attnpack::attention_autocast<c10::DispatchKey::Autocast, at::kCUDA>>);
}
