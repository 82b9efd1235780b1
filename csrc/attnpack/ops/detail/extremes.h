#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

// Turns settings of any size into numbers with which arithmetic stays finite.
namespace attnpack {

// Windows and offsets beyond any length mean the same as this one, and sums of three of them do not overflow.
constexpr int64_t kFar = int64_t{1} << 60;

inline int64_t near(int64_t x) { return std::clamp(x, -kFar, kFar); }
inline c10::SymInt near(const c10::SymInt& x) { return x.max(-kFar).min(kFar); }
inline at::Tensor near(const at::Tensor& x) { return x.to(at::kLong).clamp(-kFar, kFar); }

// The softcap c to use for scores of this accumulation dtype; 0 means none. No softcap is needed where c is far above
// every score, because c tanh(s / c) is then s. A score below the least c weighs as much as a score of 0.
inline double usable_softcap(double softcap, at::ScalarType accumulation) {
  const double most = std::ldexp(1.0, accumulation == at::kDouble ? 512 : 64);
  return softcap > 0 && softcap <= most ? std::max(softcap, 1 / most) : 0.0;
}

}  // namespace attnpack
