#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/detail/attention_quantized.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

// The derivatives are those of attention over the expanded keys and values.
AttentionResult attention_quantized_autograd(const Tensor& query, const Tensor& key, const Tensor& value, int64_t bits,
                                             c10::SymInt v_head_dim, const AttentionArguments& args) {
  const Tensor none;
  const Tensor &mask = args.mask ? *args.mask : none, &sinks = args.sinks ? *args.sinks : none;
  if (wants_formula({&query, &mask, &sinks}) || torch::autograd::compute_requires_grad(query, mask, sinks))
    return attention_quantized_formula(query, key, value, bits, v_head_dim, args);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return attention_quantized(query, key, value, bits, v_head_dim, args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("attention_quantized", attnpack::from_schema<attnpack::attention_quantized_autograd>);
}
