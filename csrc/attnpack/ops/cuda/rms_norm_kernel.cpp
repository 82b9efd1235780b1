#include <torch/library.h>

#include <attnpack/ops/rms_norm.h>

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("rms_norm", attnpack::rms_norm_formula);
  m.impl("add_rms_norm", attnpack::add_rms_norm_formula);
}
