#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/varlen_arguments.h>

namespace attnpack {
namespace {

// Casts query, key and value to autocast's dtype. With keys in pages it casts only the query, because a pool would be
// copied at each call. sinks and slopes stay as they are, because they are read in fp32.
template <c10::DispatchKey Key, c10::DeviceType Device>
AttentionResult attention_varlen_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(Key);
  const auto dtype = at::autocast::get_autocast_dtype(Device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, Device); };
  if (args.block_table) {
    ATTNPACK_CHECK(key.scalar_type() == dtype && value.scalar_type() == dtype, "key and value are pools in ",
                   key.scalar_type(), " and ", value.scalar_type(), ", autocast's dtype is ", dtype,
                   ": make the pools in that dtype");
    return attention_varlen_op(cast(query), key, value, cu_seqlens_q, args);
  }
  return attention_varlen_op(cast(query), cast(key), cast(value), cu_seqlens_q, args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, AutocastCPU, m) {
  m.impl("attention_varlen",
         attnpack::from_schema<attnpack::attention_varlen_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>>);
}
TORCH_LIBRARY_IMPL(attnpack, AutocastCUDA, m) {
  m.impl("attention_varlen",
         attnpack::from_schema<attnpack::attention_varlen_autocast<c10::DispatchKey::Autocast, at::kCUDA>>);
}
