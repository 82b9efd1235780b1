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

// Whether near_offset would change any of offsets [B] on the CPU: no operator is called for those of usual size.
inline bool has_far_offset(const at::Tensor& offsets) {
  const int64_t* const x = offsets.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < offsets.size(0); ++b)
    if (x[b * offsets.stride(0)] < -kFar / 2 || x[b * offsets.stride(0)] > kFar / 2) return true;
  return false;
}

inline double greatest_scale(at::ScalarType accumulation) { return greatest_scale(accumulation == at::kDouble); }
inline double usable_softcap(double softcap, at::ScalarType accumulation) {
  return usable_softcap(softcap, accumulation == at::kDouble);
}

}  // namespace attnpack
