#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

// Casts query, key and value to autocast's dtype. Decays, beta and states stay as they are, because they are read in
// fp32.
template <c10::DispatchKey Key, c10::DeviceType Device>
LinearAttentionResult linear_attention_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                                const LinearAttentionArguments& args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(Key);
  const auto dtype = at::autocast::get_autocast_dtype(Device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, Device); };
  return linear_attention_op(cast(query), cast(key), cast(value), args);
}
template <c10::DispatchKey Key, c10::DeviceType Device>
Tensor linear_attention_in_place_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const Tensor& state, const OwnedStateArguments& args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(Key);
  const auto dtype = at::autocast::get_autocast_dtype(Device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, Device); };
  return linear_attention_in_place_op(cast(query), cast(key), cast(value), state, args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, AutocastCPU, m) {
  m.impl("linear_attention",
         attnpack::from_schema<attnpack::linear_attention_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>>);
  m.impl("linear_attention_",
         attnpack::from_schema<attnpack::linear_attention_in_place_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>>);
}
TORCH_LIBRARY_IMPL(attnpack, AutocastCUDA, m) {
  m.impl("linear_attention",
         attnpack::from_schema<attnpack::linear_attention_autocast<c10::DispatchKey::Autocast, at::kCUDA>>);
  m.impl("linear_attention_",
         attnpack::from_schema<attnpack::linear_attention_in_place_autocast<c10::DispatchKey::Autocast, at::kCUDA>>);
}
