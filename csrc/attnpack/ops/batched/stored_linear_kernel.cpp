#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/batched/vmap_level.h>
#include <attnpack/ops/linear.h>
#include <attnpack/ops/stored_linear.h>

namespace attnpack {
namespace {

// Samples are rows of the input.
Tensor stored_linear_batched(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                             std::optional<bool> round_input) {
  VmapLevel level;
  const Sampled rows = level.unwrap(input), w = level.unwrap(weight);
  const std::optional<Sampled> b = level.unwrap(bias);
  if (level.is_foreign()) return stored_linear(input, weight, bias, round_input);
  ATTNPACK_CHECK(!w.batched && !(b && b->batched),
                 "weight or bias: got one per sample of vmap, want the same stored weights for all samples");
  return level.wrap(stored_linear(rows.tensor, weight, bias, round_input));
}

Tensor one_stored_batched(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  return stored_linear(input, weight, bias);
}

// vmap has no rule for lists of results.
std::vector<Tensor> stored_linears_batched(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  return each_linear(one_stored_batched, input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatched, m) { m.impl("stored_linear", attnpack::stored_linear_batched); }
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) {
  m.impl("stored_linears", attnpack::stored_linears_batched);
}
