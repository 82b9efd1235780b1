#pragma once

#include <attnpack/ops/cpu/isa/simd.h>

// exp and tanh of vectors, in fp32 and fp64. Coefficients: tanhf of Cephes (Moshier); Taylor for fp64.
namespace attnpack::ATTNPACK_ISA {

constexpr float kInfinity = __builtin_inff();

// The larger of x and least. NaN compares false, so it stays.
#if !defined(__AVX512F__) && !defined(__aarch64__)
inline Vec<float> at_least(Vec<float> x, float least) { return x < least ? broadcast(least) : x; }
#endif

// x 2^n for integers n >= 2 * exponent_min, in two factors so that subnormal results are rounded once.
#if !defined(__AVX512F__)
inline Vec<float> times_power_of_two(Vec<float> x, Vec<float> n) {
  const auto whole = __builtin_convertvector(n, VectorTypes<float>::Int), half = whole >> 1;
  return x * bit_cast<Vec<float>>((half + 127) << 23) * bit_cast<Vec<float>>((whole - half + 127) << 23);
}
#endif
inline Vec<double> scale_by_power(Vec<double> x, VectorTypes<double>::Int n) {
  const auto half = n >> 1;
  return x * bit_cast<Vec<double>>((half + 1023) << 52) * bit_cast<Vec<double>>((n - half + 1023) << 52);
}

// Rounds a product before it is used: compilers would otherwise fuse it with the addition that follows. An empty
// instruction hides where the product comes from. GCC's own __builtin_assoc_barrier takes vectors apart.
template <class V>
inline V unfused(V product) {
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

#define ATTNPACK_EACH _Pragma("GCC unroll 8") for (int i = 0; i < Count; ++i)

// x[i] <- 2^n[i] times a polynomial of x[i], whose highest coefficient comes first. All `Count` vectors take each step
// together: one vector alone is a long chain in which every operation waits for the one before it.
template <int Count, int Terms>
inline void scaled_polynomials(Vec<float> (&x)[Count], const Vec<float> (&n)[Count],
                               const float (&coefficients)[Terms]) {
  Vec<float> p[Count];
  ATTNPACK_EACH p[i] = broadcast(coefficients[0]);
#pragma GCC unroll 6
  for (int c = 1; c < Terms; ++c) ATTNPACK_EACH p[i] = p[i] * x[i] + coefficients[c];
  ATTNPACK_EACH x[i] = times_power_of_two(p[i], n[i]);
}

// x[i] <- exp(x[i]) for x <= 88: within 2 ulp, subnormal results too, exp(0) = 1, exp(-inf) = 0, NaN stays NaN.
//   exp(x) = 2^n exp(r),  n = round(x / ln 2),  r = x - n ln 2
// Coarse: within 4e-6 of the result for x >= -8, and within 7e-6 for all x. That is enough where results are rounded to
// 16 bit.
//   exp(x) = 2^n 2^r,  r = x / ln 2 - n
// The polynomials are minimax in relative error, exp(r) over abs(r) <= ln 2 / 2 (3e-9), 2^r over abs(r) <= 1/2 (3e-6).
template <bool Coarse = false, int Count>
inline void exp_each(Vec<float> (&x)[Count]) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLog2E = 1.44269504f;
  constexpr float kExp[] = {
      1.381454002e-3f, 8.368745113e-3f, 4.166839079e-2f, 1.666652040e-1f, 4.999999343e-1f, 1.0f, 1.0f};
  constexpr float kPowerOfTwo[] = {9.58285531e-3f, 5.59064304e-2f, 2.40240986e-1f, 6.93124193e-1f, 1.0f};
  Vec<float> n[Count];
  ATTNPACK_EACH x[i] = at_least(x[i], -105.0f);  // far enough for 0
  ATTNPACK_EACH n[i] = x[i] * kLog2E + kMagic;
  ATTNPACK_EACH n[i] -= kMagic;
  if constexpr (Coarse) {
    ATTNPACK_EACH x[i] = x[i] * kLog2E - n[i];
    scaled_polynomials(x, n, kPowerOfTwo);
  } else {
    ATTNPACK_EACH x[i] -= n[i] * 0.693359375f;
    ATTNPACK_EACH x[i] -= n[i] * -2.12194440e-4f;
    scaled_polynomials(x, n, kExp);
  }
}
#undef ATTNPACK_EACH
inline Vec<float> exp(Vec<float> x) {
  Vec<float> one[1] = {x};
  exp_each(one);
  return one[0];
}
inline Vec<double> exp(Vec<double> x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  const Vec<double> shifted = x * 1.4426950408889634 + kMagic, n = shifted - kMagic;
  Vec<double> r = x - n * 6.93145751953125e-1;
  r = r - n * 1.42860682030941723212e-6;
  Vec<double> p = broadcast(1.0 / 6227020800.0);
  constexpr double kFactorials[] = {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0,
                                    720.0,       120.0,      24.0,      6.0,      2.0,     1.0};
#pragma GCC unroll 12
  for (double factorial : kFactorials) p = p * r + 1.0 / factorial;
  p = p * r + 1.0;
  const auto exponent = bit_cast<VectorTypes<double>::Int>(shifted) - bit_cast<int64_t>(kMagic);
  const Vec<double> y = scale_by_power(p, exponent);
  return x < -745.0 ? Vec<double>{} : y;
}

template <bool = false, int Count>
inline void exp_each(Vec<double> (&x)[Count]) {
#pragma GCC unroll 4
  for (auto& one : x) one = exp(one);
}
// exp of one number, by the same arithmetic.
template <class T>
inline T exp_one(T x) {
  return exp(broadcast(x))[0];
}

inline float log_one(float x) { return static_cast<float>(__builtin_log(static_cast<double>(x))); }
inline double log_one(double x) { return __builtin_log(x); }

// log(x) for x >= 1, with a relative error below 1e-12; NaN and infinity stay.
//   x = 2^n m,  m in [sqrt(1/2), sqrt(2)),  log(m) = 2 (s + s^3/3 + s^5/5 + ...),  s = (m - 1) / (m + 1)
inline Vec<double> log(Vec<double> x) {
  typedef uint64_t Bits __attribute__((vector_size(kVectorBytes)));
  constexpr uint64_t kRootOfHalf = 0x3fe6a09e667f3bcd, kTwoTo52 = 0x4330000000000000;
  const Bits n = (bit_cast<Bits>(x) - kRootOfHalf) >> 52;
  const Vec<double> m = bit_cast<Vec<double>>(bit_cast<Bits>(x) - (n << 52));
  const Vec<double> power = bit_cast<Vec<double>>(n + kTwoTo52) - bit_cast<double>(kTwoTo52);
  const Vec<double> s = (m - 1.0) / (m + 1.0), z = s * s;
  Vec<double> series = broadcast(1.0 / 15);
#pragma GCC unroll 7
  for (int odd = 13; odd > 0; odd -= 2) series = series * z + 1.0 / odd;
  return x < static_cast<double>(kInfinity) ? power * 0.69314718055994530942 + 2.0 * s * series : x;
}
// Whether logarithms of vectors are faster than one number at a time.
template <class T>
constexpr bool kLogsTogether = sizeof(T) == sizeof(float) && kLanes<double> > 4;
// to[i] = log(x[i]) for `count` numbers >= 1. Reads and writes whole vectors of fp64.
inline void log_each(const float* x, int64_t count, float* to) {
  typedef float Few __attribute__((vector_size(kVectorBytes / 2)));
  for (int64_t i = 0; i < count; i += kLanes<double>) {
    const Few logs = __builtin_convertvector(log(__builtin_convertvector(load_bits<Few>(x + i), Vec<double>)), Few);
    __builtin_memcpy(to + i, &logs, sizeof(logs));
  }
}

inline Vec<float> tanh(Vec<float> x) {
  const Vec<float> magnitude = x < 0.0f ? -x : x;
  const Vec<float> capped = magnitude > 20.0f ? broadcast(20.0f) : magnitude;  // NaN compares false and stays
  const Vec<float> e = exp(-2.0f * capped);
  const Vec<float> large = (1.0f - e) / (1.0f + e);
  const Vec<float> z = x * x;
  Vec<float> p = broadcast(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const Vec<float> small = p * z * x + x;
  return magnitude < 0.625f ? small : (x < 0.0f ? -large : large);
}
inline Vec<double> tanh(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_tanh(x[i]);
  return x;
}

// 1 / (1 + exp(-x)); exp is taken of numbers up to 0, so that nothing overflows.
template <class V>
inline V sigmoid(V x) {
  const V e = exp(x < 0 ? x : -x), one = V{} + 1;
  return (x < 0 ? e : one) / (one + e);
}

}  // namespace attnpack::ATTNPACK_ISA
