#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <attnpack/ops/rms_norm.h>

namespace attnpack {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("attnpack::rms_norm", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, double)>();
  return op.call(x, weight, eps);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) { m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"); }
