#include <torch/library.h>

#include <attnpack/ops/batched/vmap_level.h>
#include <attnpack/ops/rms_norm.h>

namespace attnpack {
namespace {

// Samples are rows of x. If they have weights of their own, these multiply what is normalised.
Tensor rms_norm_batched(const Tensor& x, const Tensor& weight, double eps) {
  {
    VmapLevel level;
    const Sampled rows = level.unwrap(x), w = level.unwrap(weight);
    if (level.is_foreign()) return attnpack::rms_norm(x, weight, eps);
    if (!w.batched) return level.wrap(attnpack::rms_norm(rows.tensor, weight, eps));
  }
  return rms_norm_formula(x, weight, eps);
}

// The sum and the norm, each by its own rule.
std::tuple<Tensor, Tensor> add_rms_norm_batched(const Tensor& x, const Tensor& added, const Tensor& weight,
                                                double eps) {
  const Tensor sum = x + added;
  return {sum, rms_norm(sum, weight, eps)};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatched, m) { m.impl("rms_norm", attnpack::rms_norm_batched); }
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) {
  m.impl("add_rms_norm", attnpack::add_rms_norm_batched);
}
