#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

// Turns settings of any size into numbers with which arithmetic stays finite. No headers of torch.
namespace attnpack {

// Larger than any length. The sum of three such numbers does not overflow.
constexpr int64_t kFar = int64_t{1} << 60;

inline int64_t near_window(int64_t window) { return std::min(window, kFar); }

// An offset of at most 1.5 kFar that, with windows cut by near_window, leaves the same keys to every row. Cutting a
// window beyond kFar matters only to offsets beyond kFar / 2. Such an offset is reduced by as much as the window was.
// clamped(x, least, most) is std::clamp for this kind of offset.
template <typename Offset, class Clamped>
Offset near_offset(const Offset& offset, int64_t window_left, int64_t window_right, const Clamped& clamped) {
  constexpr int64_t kHalf = kFar / 2;
  const int64_t left = std::max(window_left, kFar) - kFar, right = std::max(window_right, kFar) - kFar;
  if (left == 0 && right == 0) return clamped(offset, -kHalf - kFar, kHalf + kFar);
  const Offset inner = clamped(offset, -kHalf, kHalf), rest = offset - inner;
  const Offset above = clamped(rest, 0, std::numeric_limits<int64_t>::max()) - left;
  const Offset below = clamped(rest, std::numeric_limits<int64_t>::min(), 0) + right;
  return inner + clamped(above, 0, kFar) + clamped(below, -kFar, 0);
}
inline int64_t near_offset(int64_t offset, int64_t window_left, int64_t window_right) {
  return near_offset(offset, window_left, window_right,
                     [](int64_t x, int64_t least, int64_t most) { return std::clamp(x, least, most); });
}

// Larger scales overflow in kernels, which multiply them with log2(e). wide: the accumulation type is double.
inline double greatest_scale(bool wide) {
  return (wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max()) / 2;
}

// The scale where none is given. With head_dim 0 the scores are 0.
inline double default_scale(int64_t head_dim) {
  return head_dim > 0 ? 1.0 / std::sqrt(static_cast<double>(head_dim)) : 1.0;
}

// The softcap c to use for scores of this accumulation type; 0 means none. No softcap is needed where c is far above
// every score, because c tanh(s / c) is then s. A score below the least c weighs as much as a score of 0.
inline double usable_softcap(double softcap, bool wide) {
  const double most = std::ldexp(1.0, wide ? 512 : 64);
  return softcap > 0 && softcap <= most ? std::max(softcap, 1 / most) : 0.0;
}

}  // namespace attnpack
