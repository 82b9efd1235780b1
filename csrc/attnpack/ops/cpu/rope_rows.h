#pragma once

#include <ATen/OpMathType.h>
#include <c10/util/ArrayRef.h>

#include <cmath>

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

// Numbers that lie `step` apart.
template <class T>
struct Strided {
  T* data;
  int64_t step;
  T& operator[](int64_t i) const { return data[i * step]; }
};

// One row of a head, from [dim] -> to [dim]: 2 half dims are rotated, the others copied.
template <class T, class Table>
void rotate_row(Strided<const T> from, Strided<const Table> cos, Strided<const Table> sin, int64_t half, int64_t dim,
                bool interleaved, Strided<T> to) {
  using A = at::opmath_type<T>;
  const int64_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const A first = from[i * step], second = from[i * step + partner];
    const A c = static_cast<A>(cos[i]), s = static_cast<A>(sin[i]);
    to[i * step] = static_cast<T>(first * c - second * s);
    to[i * step + partner] = static_cast<T>(second * c + first * s);
  }
  for (int64_t d = 2 * half; d < dim; ++d) to[d] = from[d];
}

}  // namespace attnpack
