#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <attnpack/core/params.h>
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// Storage types, and their conversion to and from the numbers to compute with. Host and device give the same bits.
namespace attnpack::cuda {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class S>
struct Accumulation {
  using type = float;
};
template <>
struct Accumulation<double> {
  using type = double;
};

ATTNPACK_HD inline uint32_t float_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}
ATTNPACK_HD inline float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

ATTNPACK_HD inline double widen(double x) { return x; }
ATTNPACK_HD inline float widen(float x) { return x; }
ATTNPACK_HD inline float widen(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
ATTNPACK_HD inline float widen(Float16 x) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(x.bits));
#else
  _Float16 h;
  std::memcpy(&h, &x.bits, sizeof h);
  return static_cast<float>(h);
#endif
}

ATTNPACK_HD inline void narrow(double x, double* to) { *to = x; }
ATTNPACK_HD inline void narrow(float x, float* to) { *to = x; }
// Rounds to nearest even; NaN stays NaN.
ATTNPACK_HD inline void narrow(float x, BFloat16* to) {
#ifdef __CUDA_ARCH__
  to->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  const uint32_t bits = float_bits(x);
  to->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}
ATTNPACK_HD inline void narrow(float x, Float16* to) {
#ifdef __CUDA_ARCH__
  to->bits = __half_as_ushort(__float2half_rn(x));
#else
  const _Float16 h = static_cast<_Float16>(x);
  std::memcpy(&to->bits, &h, sizeof h);
#endif
}

// Packs two numbers into one register, the first into its low half. On the device by one instruction for both.
template <class S>
ATTNPACK_HD inline uint32_t pack(float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t both;
  if constexpr (std::is_same_v<S, BFloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  S a, b;
  narrow(low, &a);
  narrow(high, &b);
  return static_cast<uint32_t>(a.bits) | static_cast<uint32_t>(b.bits) << 16;
#endif
}

template <class A>
ATTNPACK_HD inline A infinity() {
  return static_cast<A>(__builtin_huge_val());
}
// Whether a weight is -0.0, the mark of an excluded pair, as on the CPU. The number that it would multiply must not
// come in as 0 * NaN.
template <class A>
ATTNPACK_HD inline bool marks_excluded(A weight) {
  return weight == 0 && std::signbit(weight);
}
// The weight of an attended pair. A zero loses the sign that marks excluded pairs. Adding 0 would not do, because a
// fused multiply-add may swallow it.
template <class A>
ATTNPACK_HD inline A unmarked(A weight) {
  return weight == 0 ? A(0) : weight;
}
ATTNPACK_HD inline bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }
// The larger of two numbers. It drops NaN; the sum keeps it.
ATTNPACK_HD inline float larger(float a, float b) { return fmaxf(a, b); }
ATTNPACK_HD inline double larger(double a, double b) { return fmax(a, b); }

// The exponent of a probability, score - lse, which is 0 at most. The roundings of two huge numbers differ by more than
// 1, so the difference is bounded. NaN compares false, so it stays.
template <class A>
ATTNPACK_HD inline A bounded_exponent(A x) {
  return x > A(0) ? A(0) : x;
}
// From this size of lse on, in powers of two, the roundings show: below it they raise a probability by a few percent.
constexpr float kHugeScore = 1 << 17;
ATTNPACK_HD inline bool is_huge(float x) { return std::fabs(x) > kHugeScore; }

}  // namespace attnpack::cuda
