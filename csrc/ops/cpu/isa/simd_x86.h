#pragma once

#include <immintrin.h>

#include <cstdint>

// The few x86 instructions that the vector extensions cannot express.
namespace attnpack::ATTNPACK_ISA {

#if defined(__AVX512F__)
typedef uint16_t HalfBits __attribute__((vector_size(32)));
typedef float FloatVector __attribute__((vector_size(64)));
inline FloatVector half_to_float(HalfBits half) { return (FloatVector)_mm512_cvtph_ps((__m256i)half); }
#else
typedef uint16_t HalfBits __attribute__((vector_size(16)));
typedef float FloatVector __attribute__((vector_size(32)));
inline FloatVector half_to_float(HalfBits half) { return (FloatVector)_mm256_cvtph_ps((__m128i)half); }
#endif

}  // namespace attnpack::ATTNPACK_ISA
