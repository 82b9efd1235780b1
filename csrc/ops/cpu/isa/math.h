#pragma once

#include <attnpack/ops/cpu/isa/simd.h>

// exp and tanh of vectors, in fp32 and fp64. Coefficients: Cephes (Moshier) expf and tanhf; Taylor for fp64.
namespace attnpack::ATTNPACK_ISA {

constexpr float kInfinity = __builtin_inff();

// 2^n for integers n >= 2 * exponent_min, in two factors so that subnormal results are exact.
inline Vec<float> scale_by_power(Vec<float> x, VectorTypes<float>::Int n) {
  const auto half = n >> 1;
  return x * bit_cast<Vec<float>>((half + 127) << 23) * bit_cast<Vec<float>>((n - half + 127) << 23);
}
inline Vec<double> scale_by_power(Vec<double> x, VectorTypes<double>::Int n) {
  const auto half = n >> 1;
  return x * bit_cast<Vec<double>>((half + 1023) << 52) * bit_cast<Vec<double>>((n - half + 1023) << 52);
}

// exp(x) for x <= 88: within 2 ulp, exp(-inf) = 0, NaN stays NaN.
inline Vec<float> exp(Vec<float> x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec<float> shifted = x * 1.44269504f + kMagic, n = shifted - kMagic;
  Vec<float> r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec<float> p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const auto exponent = bit_cast<VectorTypes<float>::Int>(shifted) - bit_cast<int32_t>(kMagic);
  const Vec<float> y = scale_by_power(p, exponent);
  return x < -104.0f ? Vec<float>{} : y;
}
inline Vec<double> exp(Vec<double> x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  const Vec<double> shifted = x * 1.4426950408889634 + kMagic, n = shifted - kMagic;
  Vec<double> r = x - n * 6.93145751953125e-1;
  r = r - n * 1.42860682030941723212e-6;
  Vec<double> p = broadcast(1.0 / 6227020800.0);
  constexpr double kFactorials[] = {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0,
                                    720.0,       120.0,      24.0,      6.0,      2.0,     1.0};
  for (double factorial : kFactorials) p = p * r + 1.0 / factorial;
  p = p * r + 1.0;
  const auto exponent = bit_cast<VectorTypes<double>::Int>(shifted) - bit_cast<int64_t>(kMagic);
  const Vec<double> y = scale_by_power(p, exponent);
  return x < -745.0 ? Vec<double>{} : y;
}

// exp of one number, by the same arithmetic.
template <class T>
inline T exp_one(T x) {
  return exp(broadcast(x))[0];
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

}  // namespace attnpack::ATTNPACK_ISA
