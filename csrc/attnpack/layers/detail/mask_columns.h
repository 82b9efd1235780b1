#pragma once

#include <ATen/ATen.h>

#include <optional>

#include <attnpack/ops/detail/unknown_sizes.h>

// The columns of a mask over a cache: one for each position, or a single one for all.
namespace attnpack {

inline bool covers_positions(const std::optional<at::Tensor>& mask) {
  return mask && mask->dim() > 0 && !is_one(mask->sym_size(-1));
}

// Columns [first, first + count) of the mask.
inline std::optional<at::Tensor> mask_from(const std::optional<at::Tensor>& mask, const c10::SymInt& first,
                                           const c10::SymInt& count) {
  return covers_positions(mask) ? mask->narrow_symint(-1, first, count) : mask;
}

}  // namespace attnpack
