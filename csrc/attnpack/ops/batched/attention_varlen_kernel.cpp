#include <torch/library.h>

#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/varlen_arguments.h>

namespace attnpack {
namespace {

// Under vmap each sequence is a call of its own, and the samples are the call's batch.
AttentionResult attention_varlen_batched(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  return attend_each_sequence(&attention_op, query, key, value, cu_seqlens_q, args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) {
  m.impl("attention_varlen", attnpack::from_schema<attnpack::attention_varlen_batched>);
  m.impl("attention_varlen_backward", attnpack::from_schema<attnpack::differentiate_each_sequence>);
}
