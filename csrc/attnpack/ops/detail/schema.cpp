#include <attnpack/ops/detail/schema.h>

#include <string>

namespace attnpack::detail {

void refuse_undefined(const c10::OperatorHandle& op, size_t index) {
  check_defined(op.schema().arguments()[index].name().c_str(), at::Tensor());
}

void refuse_undefined(const c10::OperatorHandle& op, size_t index, size_t element) {
  const auto name = op.schema().arguments()[index].name() + "[" + std::to_string(element) + "]";
  check_defined(name.c_str(), at::Tensor());
}

}  // namespace attnpack::detail
