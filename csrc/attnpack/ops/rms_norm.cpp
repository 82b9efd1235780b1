#include <torch/library.h>

#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/rms_norm.h>

namespace attnpack {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  static const DispatchedOp<decltype(rms_norm)> op("attnpack::rms_norm");
  return op(x, weight, eps);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) { m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"); }
