#include <torch/library.h>

#include <attnpack/ops/batched/vmap_level.h>
#include <attnpack/ops/linear.h>

namespace attnpack {
namespace {

// Samples are rows of the input. If they have weights of their own, torch's linear multiplies them.
Tensor linear_batched(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_linear_shapes(input, weight, bias);
  {
    VmapLevel level;
    const Sampled rows = level.unwrap(input), w = level.unwrap(weight);
    const std::optional<Sampled> b = level.unwrap(bias);
    if (level.is_foreign()) return attnpack::linear(input, weight, bias);
    if (!w.batched && !(b && b->batched)) return level.wrap(attnpack::linear(rows.tensor, weight, bias));
  }
  return linear_formula(input, weight, bias);
}

// vmap has no rule for lists of results.
std::vector<Tensor> linears_batched(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  return each_linear(attnpack::linear<>, input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatched, m) { m.impl("linear", attnpack::linear_batched); }
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) { m.impl("linears", attnpack::linears_batched); }
