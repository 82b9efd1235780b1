#pragma once

#include <ATen/ATen.h>

#include <attnpack/core/extremes.h>

// core/extremes.h for torch's numbers.
namespace attnpack {

inline c10::SymInt near_offset(const c10::SymInt& offset, int64_t window_left, int64_t window_right) {
  return near_offset(offset, window_left, window_right,
                     [](const c10::SymInt& x, int64_t least, int64_t most) { return x.max(least).min(most); });
}
inline at::Tensor near_offset(const at::Tensor& offset, int64_t window_left, int64_t window_right) {
  return near_offset(offset, window_left, window_right,
                     [](const at::Tensor& x, int64_t least, int64_t most) { return x.clamp(least, most); });
}

inline double greatest_scale(at::ScalarType accumulation) { return greatest_scale(accumulation == at::kDouble); }
inline double usable_softcap(double softcap, at::ScalarType accumulation) {
  return usable_softcap(softcap, accumulation == at::kDouble);
}

}  // namespace attnpack
