#include <torch/library.h>

#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

Tensor linear_attention_in_place_formula(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Tensor& state, const OwnedStateArguments& args) {
  check_linear_attention_in_place(query, key, value, state, args);
  return linear_attention_by_copy(query, key, value, state, args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("linear_attention", attnpack::from_schema<attnpack::linear_attention_formula>);
  m.impl("linear_attention_", attnpack::from_schema<attnpack::linear_attention_in_place_formula>);
  m.impl("linear_attention_backward", attnpack::from_schema<attnpack::linear_attention_backward_formula>);
}
