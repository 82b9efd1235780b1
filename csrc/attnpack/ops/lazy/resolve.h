#pragma once

#include <ATen/ATen.h>

#include <optional>

namespace attnpack {

// x with its negation and conjugation done.
inline at::Tensor resolve(const at::Tensor& x) { return x.resolve_conj().resolve_neg(); }
inline std::optional<at::Tensor> resolve(const std::optional<at::Tensor>& x) {
  return x ? std::optional(resolve(*x)) : std::nullopt;
}

}  // namespace attnpack
