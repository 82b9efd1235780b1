#include <torch/library.h>

#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/schema.h>

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("linear_attention", attnpack::from_schema<attnpack::linear_attention_formula>);
  m.impl("linear_attention_backward", attnpack::from_schema<attnpack::linear_attention_backward_formula>);
}
