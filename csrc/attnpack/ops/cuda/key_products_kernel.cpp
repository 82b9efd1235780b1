#include <torch/library.h>

#include <attnpack/ops/key_products.h>

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) { m.impl("key_products", attnpack::key_products_formula); }
