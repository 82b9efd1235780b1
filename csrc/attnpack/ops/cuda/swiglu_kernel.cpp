#include <torch/library.h>

#include <attnpack/ops/swiglu.h>

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) { m.impl("swiglu", attnpack::swiglu_formula); }
