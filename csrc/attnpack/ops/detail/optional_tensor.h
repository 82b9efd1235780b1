#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace attnpack {

// An argument that may be missing, as autograd's functions take it: an undefined tensor; and back.
inline at::Tensor or_undefined(const std::optional<at::Tensor>& x) { return x.value_or(at::Tensor()); }
inline std::optional<at::Tensor> if_defined(const at::Tensor& x) {
  return x.defined() ? std::make_optional(x) : std::nullopt;
}

}  // namespace attnpack
