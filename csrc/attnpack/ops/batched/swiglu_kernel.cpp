#include <torch/library.h>

#include <attnpack/ops/batched/vmap_level.h>
#include <attnpack/ops/swiglu.h>

namespace attnpack {
namespace {

// Samples are rows of both. If only one of them has samples, torch's operators multiply them.
Tensor swiglu_batched(const Tensor& gate, const Tensor& up) {
  {
    VmapLevel level;
    const Sampled g = level.unwrap(gate), u = level.unwrap(up);
    if (level.is_foreign()) return swiglu(gate, up);
    if (g.batched && u.batched) return level.wrap(swiglu(g.tensor, u.tensor));
  }
  return swiglu_formula(gate, up);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatched, m) { m.impl("swiglu", attnpack::swiglu_batched); }
