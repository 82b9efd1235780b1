#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <attnpack/ops/linear.h>

namespace attnpack {

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("attnpack::linear", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&)>();
  return op.call(input, weight, bias);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) { m.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor"); }
