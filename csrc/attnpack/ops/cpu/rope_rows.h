#pragma once

#include <ATen/OpMathType.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

// The rotation at one position, for RoPE's own ops and for the cache op that rotates the keys it takes.
namespace attnpack {

// cos and sin [half] of a position: angles in fp64.
inline void fill_angles(int64_t position, at::ArrayRef<double> inv_freq, double factor, float* cos, float* sin) {
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double angle = static_cast<double>(position) * inv_freq[i];
    cos[i] = static_cast<float>(std::cos(angle) * factor);
    sin[i] = static_cast<float>(std::sin(angle) * factor);
  }
}

// The cos and sin of one position after the other. All layers of a step ask for the same position: each thread keeps
// what it computed last.
class LastAngles {
 public:
  static const LastAngles& at(int64_t position, at::ArrayRef<double> inv_freq, double factor) {
    static thread_local LastAngles last;
    if (last.position_ != position || last.factor_ != factor || !inv_freq.equals(last.inv_freq_))
      last.compute(position, inv_freq, factor);
    return last;
  }
  const float* cos() const { return cos_.data(); }
  const float* sin() const { return sin_.data(); }

 private:
  void compute(int64_t position, at::ArrayRef<double> inv_freq, double factor) {
    inv_freq_.assign(inv_freq.begin(), inv_freq.end());
    cos_.resize(inv_freq.size());
    sin_.resize(inv_freq.size());
    fill_angles(position, inv_freq, factor, cos_.data(), sin_.data());
    position_ = position;
    factor_ = factor;
  }

  int64_t position_ = std::numeric_limits<int64_t>::min();  // that of none
  double factor_ = 0;
  std::vector<double> inv_freq_;
  std::vector<float> cos_, sin_;
};

// Numbers that lie `step` apart.
template <class T>
struct Strided {
  T* data;
  int64_t step;
  T& operator[](int64_t i) const { return data[i * step]; }
};

// The pairs of a row, whose numbers lie `step` and `partner` apart.
template <class From, class Table, class To>
void rotate_pairs(From from, Table cos, Table sin, int64_t half, int64_t step, int64_t partner, To to) {
  using T = std::remove_reference_t<decltype(to[0])>;
  using A = at::opmath_type<T>;
  for (int64_t i = 0; i < half; ++i) {
    const A first = from[i * step], second = from[i * step + partner];
    const A c = static_cast<A>(cos[i]), s = static_cast<A>(sin[i]);
    to[i * step] = static_cast<T>(first * c - second * s);
    to[i * step + partner] = static_cast<T>(second * c + first * s);
  }
}

// One row of a head, from [dim] -> to [dim]: 2 half dims are rotated, the others copied.
template <class T, class Table>
void rotate_row(Strided<const T> from, Strided<const Table> cos, Strided<const Table> sin, int64_t half, int64_t dim,
                bool interleaved, Strided<T> to) {
  if (!interleaved && from.step == 1 && to.step == 1 && cos.step == 1 && sin.step == 1)  // by vectors
    rotate_pairs(from.data, cos.data, sin.data, half, 1, half, to.data);
  else
    rotate_pairs(from, cos, sin, half, interleaved ? 2 : 1, interleaved ? 1 : half, to);
  for (int64_t d = 2 * half; d < dim; ++d) to[d] = from[d];
}

}  // namespace attnpack
