#include <torch/library.h>

#include <attnpack/ops/linear.h>

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("linear", attnpack::linear_formula);
  m.impl("linears", attnpack::linears_formula);
}
