#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace attnpack::convert {

// Two dims of a head that RoPE rotates together, as one complex number. A rotation multiplies it by e^(i angle), which
// commutes with any complex factor.
struct RopePair {
  int64_t first, second;

  RopePair(int64_t index, int64_t rope_dim, bool interleaved)
      : first(interleaved ? 2 * index : index), second(interleaved ? 2 * index + 1 : index + rope_dim / 2) {}

  // rows [..., D, E] -> [..., 1, E], complex
  at::Tensor get(const at::Tensor& rows) const {
    return at::complex(rows.select(-2, first), rows.select(-2, second)).unsqueeze(-2);
  }
  // values [..., 1, E], complex, into rows [..., D, E]
  void set(const at::Tensor& rows, const at::Tensor& values) const {
    rows.select(-2, first).copy_(at::real(values).squeeze(-2));
    rows.select(-2, second).copy_(at::imag(values).squeeze(-2));
  }
};

}  // namespace attnpack::convert
