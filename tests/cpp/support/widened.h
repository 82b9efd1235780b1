#pragma once

#include <vector>

#include <attnpack/ops/cuda/kernels/numbers.cuh>

namespace attnpack::cuda {

// widen(x), from a table for halves: their conversion is a call of the compiler's library, where the compiler may not
// count on the processor's instruction.
template <class S>
auto widened(S x) {
  return widen(x);
}
inline const std::vector<float> all_halves = [] {
  std::vector<float> numbers;
  for (int bits = 0; bits <= 0xffff; ++bits) numbers.push_back(widen(Float16{static_cast<uint16_t>(bits)}));
  return numbers;
}();
inline float widened(Float16 x) { return all_halves[x.bits]; }

}  // namespace attnpack::cuda
