#include <torch/library.h>

#include <attnpack/ops/detail/causal_conv1d_arguments.h>
#include <attnpack/ops/detail/schema.h>

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("causal_conv1d", attnpack::from_schema<attnpack::causal_conv1d_formula>);
  m.impl("causal_conv1d_backward", attnpack::from_schema<attnpack::causal_conv1d_backward_formula>);
}
