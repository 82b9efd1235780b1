#pragma once

#include <immintrin.h>

#include <cstdint>

// The few x86 instructions that the vector extensions cannot express.
namespace attnpack::ATTNPACK_ISA {

#if defined(__AVX512F__)
typedef uint16_t HalfBits __attribute__((vector_size(32)));
typedef float FloatVector __attribute__((vector_size(64)));
inline FloatVector half_to_float(HalfBits half) { return (FloatVector)_mm512_cvtph_ps((__m256i)half); }
inline FloatVector bfloat_to_float(HalfBits half) {
  return (FloatVector)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
}
// The larger of x and least; NaN stays.
inline FloatVector at_least(FloatVector x, float least) {
  return (FloatVector)_mm512_max_ps(_mm512_set1_ps(least), (__m512)x);
}
// The first count < 16 numbers, then zeros.
inline FloatVector load_first(const float* p, int64_t count) {
  return (FloatVector)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
}
inline HalfBits load_first_halves(const void* p, int64_t count) {
  return (HalfBits)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), p);
}
// One bool per lane: x where it is true, else other.
inline FloatVector where(const bool* m, FloatVector x, FloatVector other) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(m)));
  return (FloatVector)_mm512_mask_blend_ps(_mm512_test_epi32_mask(wide, wide), (__m512)other, (__m512)x);
}
// Signed or unsigned bytes, one per lane.
typedef int32_t IntegerVector __attribute__((vector_size(64)));
inline IntegerVector widen(const int8_t* p) {
  return (IntegerVector)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline IntegerVector widen(const uint8_t* p) {
  return (IntegerVector)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// x 2^n, rounded once.
inline FloatVector times_power_of_two(FloatVector x, FloatVector n) {
  return (FloatVector)_mm512_scalef_ps((__m512)x, (__m512)n);
}
#if defined(__AVX512BF16__)
typedef uint32_t PairVector __attribute__((vector_size(64)));
// sum + the products of each lane's pairs. The second product is added first (Intel SDM, VDPBF16PS).
inline FloatVector pair_products(FloatVector sum, PairVector a, PairVector b) {
  return (FloatVector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// Rounds 32 numbers to nearest even; those of `low` come first.
inline PairVector to_pairs(FloatVector low, FloatVector high) {
  return (PairVector)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
// Rounds a vector to 16 bf16 at p. Returns false, and writes nothing, where it holds subnormal numbers, which the
// instruction would turn into 0.
inline bool store_rounded(void* p, FloatVector x) {
  constexpr int kSubnormal = 0x20;
  if (_mm512_fpclass_ps_mask((__m512)x, kSubnormal)) return false;
  _mm256_storeu_si256(static_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
  return true;
}
// Copies count <= 16 pairs from a row of `numbers` bf16. Numbers past the row count as 0.
inline void copy_pairs(const void* from, int64_t numbers, int64_t count, uint32_t* to) {
  const int64_t loaded = numbers < 2 * count ? numbers : 2 * count;
  const __m512i x = _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << loaded) - 1), from);
  _mm512_mask_storeu_epi32(to, static_cast<__mmask16>((1u << count) - 1), x);
}
#endif
#else
typedef uint16_t HalfBits __attribute__((vector_size(16)));
typedef float FloatVector __attribute__((vector_size(32)));
inline FloatVector half_to_float(HalfBits half) { return (FloatVector)_mm256_cvtph_ps((__m128i)half); }
inline FloatVector bfloat_to_float(HalfBits half) {
  return (FloatVector)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)half), 16);
}
inline FloatVector where(const bool* m, FloatVector x, FloatVector other) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(m)));
  const __m256i is_false = _mm256_cmpeq_epi32(wide, _mm256_setzero_si256());
  return (FloatVector)_mm256_blendv_ps((__m256)x, (__m256)other, (__m256)is_false);
}
typedef int32_t IntegerVector __attribute__((vector_size(32)));
inline IntegerVector widen(const int8_t* p) {
  return (IntegerVector)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline IntegerVector widen(const uint8_t* p) {
  return (IntegerVector)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
#endif

// The number of 16 bits at p, which need not be aligned.
inline float half_at(const void* p) {
  unsigned short bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return _cvtsh_ss(bits);
}

}  // namespace attnpack::ATTNPACK_ISA
