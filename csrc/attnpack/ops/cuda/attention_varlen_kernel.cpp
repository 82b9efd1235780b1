#include <torch/library.h>

#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/varlen_arguments.h>

// A composition: one call of `attention` for each sequence. It reads cu_seqlens, so it waits for the device.
namespace attnpack {
namespace {

AttentionResult attention_varlen_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  return attend_each_sequence(&attention_op, query, key, value, cu_seqlens_q, args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("attention_varlen", attnpack::from_schema<attnpack::attention_varlen_cuda>);
  m.impl("attention_varlen_backward", attnpack::from_schema<attnpack::differentiate_each_sequence>);
}
