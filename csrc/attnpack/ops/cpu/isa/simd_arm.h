#pragma once

#include <arm_neon.h>

#include <cstdint>

// The few Arm instructions that the vector extensions cannot express (Arm C Language Extensions, 2024Q3).
namespace attnpack::ATTNPACK_ISA {

typedef uint16_t HalfBits __attribute__((vector_size(8)));
typedef float FloatVector __attribute__((vector_size(16)));
inline FloatVector half_to_float(HalfBits half) { return (FloatVector)vcvt_f32_f16((float16x4_t)half); }
inline FloatVector bfloat_to_float(HalfBits half) { return (FloatVector)vshll_n_u16((uint16x4_t)half, 16); }
// The larger of x and least; NaN stays.
inline FloatVector at_least(FloatVector x, float least) {
  return (FloatVector)vmaxq_f32((float32x4_t)x, vdupq_n_f32(least));
}
inline uint32_t four_bytes(const void* p) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return bytes;
}
// One bool per lane: x where it is true, else other.
inline FloatVector where(const bool* m, FloatVector x, FloatVector other) {
  const uint32x4_t wide = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four_bytes(m)))));
  return (FloatVector)vbslq_f32(vtstq_u32(wide, wide), (float32x4_t)x, (float32x4_t)other);
}
// Signed or unsigned bytes, one per lane.
typedef int32_t IntegerVector __attribute__((vector_size(16)));
inline IntegerVector widen(const int8_t* p) {
  return (IntegerVector)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four_bytes(p)))));
}
inline IntegerVector widen(const uint8_t* p) {
  return (IntegerVector)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four_bytes(p)))));
}
// The number of 16 bits at p, which need not be aligned.
inline float half_at(const void* p) {
  __fp16 half;
  __builtin_memcpy(&half, p, sizeof(half));
  return half;
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
typedef uint32_t PairVector __attribute__((vector_size(16)));
// sum + the products of each lane's pairs (BFDOT). An empty instruction hides where b comes from: GCC up to 13 writes
// constants of bf16 as if they were fp16 (its bug 111867).
inline FloatVector pair_products(FloatVector sum, PairVector a, PairVector b) {
  asm("" : "+w"(b));
  return (FloatVector)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
// Rounds 8 numbers to nearest even; those of `low` come first.
inline PairVector to_pairs(FloatVector low, FloatVector high) {
  return (PairVector)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
}
// Rounds a vector to 4 bf16 at p. Returns true: subnormal numbers are rounded too.
inline bool store_rounded(void* p, FloatVector x) {
  const bfloat16x4_t rounded = vcvt_bf16_f32((float32x4_t)x);
  __builtin_memcpy(p, &rounded, sizeof(rounded));
  return true;
}
#endif

}  // namespace attnpack::ATTNPACK_ISA
