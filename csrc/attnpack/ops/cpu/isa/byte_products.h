#pragma once

#include <attnpack/ops/cpu/isa/simd.h>

// Sums of products of bytes, by VPDPBUSD or, where the CPU lacks it, by VPMADDUBSW; on Arm by USDOT or SDOT. And the
// bytes of several rows, side by side: a vector has a lane of 32 bits per row.
namespace attnpack::ATTNPACK_ISA {

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define ATTNPACK_BYTE_PRODUCTS
#endif

#if !defined(ATTNPACK_BYTE_PRODUCTS)
constexpr bool kByteProducts = false;
#else
constexpr bool kByteProducts = true;
// Whether unsigned codes of 8 bits may be multiplied: VPMADDUBSW has sums of 16 bits, SDOT wants signed codes.
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kWideCodes = true;
#else
constexpr bool kWideCodes = false;
#endif

#if defined(__AVX512F__)
typedef __m512i Bytes;
typedef __m512 Floats;
#elif defined(__aarch64__)
typedef int32x4_t Bytes;
typedef float32x4_t Floats;
#else
typedef __m256i Bytes;
typedef __m256 Floats;
#endif
typedef VectorTypes<float>::Int Words;
typedef VectorTypes<float>::Bits Bits;

// GCC leaves some lambdas out of line, and what they write then stands in memory.
#define ATTNPACK_INLINED __attribute__((always_inline))

template <int I>
using Index = std::integral_constant<int, I>;

template <int... I, class F>
[[gnu::always_inline]] inline void unrolled(std::integer_sequence<int, I...>, F&& f) {
  (f(Index<I>()), ...);
}
// f(Index<0>()), ... f(Index<Count - 1>()).
template <int Count, class F>
[[gnu::always_inline]] inline void unrolled(F&& f) {
  unrolled(std::make_integer_sequence<int, Count>(), f);
}

inline Bytes all_of(int32_t x) { return Bytes(Words{} + x); }
inline Bytes load_bytes(const void* p) {
  Bytes x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
inline void store_bytes(void* p, Bytes x) { __builtin_memcpy(p, &x, sizeof(x)); }
inline Floats load_floats(const float* p) {
  Floats x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
inline void store_floats(float* p, Floats x) { __builtin_memcpy(p, &x, sizeof(x)); }
inline Floats to_floats(Bytes x) { return __builtin_convertvector(Words(x), Floats); }
inline Bytes bits_of(Bytes a, int32_t mask) { return Bytes(Words(a) & mask); }
inline Bytes either(Bytes a, Bytes b) { return a | b; }
inline Bytes flipped(Bytes a, int32_t mask) { return Bytes(Words(a) ^ mask); }
inline Bytes add(Bytes a, Bytes b) { return Bytes(Words(a) + Words(b)); }
inline Bytes multiply(Bytes a, int32_t b) { return Bytes(Words(a) * b); }
template <int Count>
inline Bytes shifted_right(Bytes a) {
  return Bytes(Bits(a) >> Count);
}
template <int Count>
inline Bytes shifted_left(Bytes a) {
  return Bytes(Words(a) << Count);
}
template <int Byte>
inline Bytes signed_byte(Bytes a) {
  return Bytes(Words(shifted_left<24 - 8 * Byte>(a)) >> 24);
}

#if defined(__AVX512F__)
inline Floats all_of(float x) { return _mm512_set1_ps(x); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// The numbers of 16 bits in the lower halves of the lanes.
inline Floats lower_halves(Bytes a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }

#if defined(__AVX512VNNI__)
// sum + the products of four unsigned and four signed bytes, lane by lane. As an instruction of its own, because GCC 12
// copies the sums of its builtin in every round of a loop.
inline Bytes add_products(Bytes sum, Bytes codes, Bytes x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
  return sum;
}
#else
inline Bytes add_products(Bytes sum, Bytes codes, Bytes x) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, x), _mm512_set1_epi16(1)));
}
#endif
// The same for signed codes.
inline Bytes add_signed_products(Bytes sum, Bytes codes, Bytes x) {
  const Bytes turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), x);
  return add_products(sum, _mm512_abs_epi8(codes), turned);
}

// The first 16 bytes of 16 rows: vector i has bytes 4 i to 4 i + 3 of each row.
[[gnu::always_inline]] inline void load_columns(const uint8_t* p, int64_t stride, Bytes (&to)[4]) {
  Bytes rows[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto row = [&](int lane) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + (4 * lane + i) * stride));
    };
    rows[i] = _mm512_mask_broadcast_i32x4(_mm512_castsi128_si512(row(0)), 0x00f0, row(1));
    rows[i] = _mm512_mask_broadcast_i32x4(rows[i], 0x0f00, row(2));
    rows[i] = _mm512_mask_broadcast_i32x4(rows[i], 0xf000, row(3));
  }
  const Bytes a = _mm512_unpacklo_epi32(rows[0], rows[1]), b = _mm512_unpackhi_epi32(rows[0], rows[1]),
              c = _mm512_unpacklo_epi32(rows[2], rows[3]), d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  to[0] = _mm512_unpacklo_epi64(a, c);
  to[1] = _mm512_unpackhi_epi64(a, c);
  to[2] = _mm512_unpacklo_epi64(b, d);
  to[3] = _mm512_unpackhi_epi64(b, d);
}
#elif defined(__aarch64__)
inline Floats all_of(float x) { return vdupq_n_f32(x); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats lower_halves(Bytes a) { return vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(a))); }
inline Bytes add_signed_products(Bytes sum, Bytes codes, Bytes x) {
  return vdotq_s32(sum, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(x));
}
inline Bytes add_products(Bytes sum, Bytes codes, Bytes x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_s32(sum, vreinterpretq_u8_s32(codes), vreinterpretq_s8_s32(x));
#else
  return add_signed_products(sum, codes, x);
#endif
}
inline void load_columns(const uint8_t* p, int64_t stride, Bytes (&to)[4]) {
  const auto row = [&](int i) { return load_bytes(p + i * stride); };
  const int32x4x2_t a = vtrnq_s32(row(0), row(1)), b = vtrnq_s32(row(2), row(3));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    to[i] = vcombine_s32(vget_low_s32(a.val[i]), vget_low_s32(b.val[i]));
    to[i + 2] = vcombine_s32(vget_high_s32(a.val[i]), vget_high_s32(b.val[i]));
  }
}
#else
inline Floats all_of(float x) { return _mm256_set1_ps(x); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats lower_halves(Bytes a) {
  const Bytes low = bits_of(a, 0xffff);
  return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}
inline Bytes add_products(Bytes sum, Bytes codes, Bytes x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
inline Bytes add_signed_products(Bytes sum, Bytes codes, Bytes x) {
  return add_products(sum, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
}
[[gnu::always_inline]] inline void load_columns(const uint8_t* p, int64_t stride, Bytes (&to)[4]) {
  Bytes rows[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto row = [&](int lane) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + (4 * lane + i) * stride));
    };
    rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1);
  }
  const Bytes a = _mm256_unpacklo_epi32(rows[0], rows[1]), b = _mm256_unpackhi_epi32(rows[0], rows[1]),
              c = _mm256_unpacklo_epi32(rows[2], rows[3]), d = _mm256_unpackhi_epi32(rows[2], rows[3]);
  to[0] = _mm256_unpacklo_epi64(a, c);
  to[1] = _mm256_unpackhi_epi64(a, c);
  to[2] = _mm256_unpacklo_epi64(b, d);
  to[3] = _mm256_unpackhi_epi64(b, d);
}
#endif

// The upper half of each lane of a, and above it the lower half of b.
inline Bytes joined_halves(Bytes a, Bytes b) {
#if defined(__AVX512F__)
  return _mm512_rol_epi32(_mm512_mask_blend_epi16(0xaaaaaaaa, b, a), 16);
#else
  return either(shifted_right<16>(a), shifted_left<16>(b));
#endif
}

inline Floats upper_halves(Bytes a) { return lower_halves(shifted_right<16>(a)); }

// Four bytes of each row. Several chains of blends, because each waits for the one before it.
[[gnu::always_inline]] inline Bytes load_column(const uint8_t* p, int64_t stride) {
#if defined(__aarch64__)
  Words rows;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) __builtin_memcpy(reinterpret_cast<char*>(&rows) + 4 * i, p + i * stride, 4);
  return Bytes(rows);
#else
  const auto four = [&](int lane) {
    int32_t x;
    __builtin_memcpy(&x, p + lane * stride, 4);
    return x;
  };
#if defined(__AVX512F__)
  Bytes x[4];
  unrolled<4>([&](auto i) ATTNPACK_INLINED {
    x[i] = _mm512_maskz_set1_epi32(1 << 4 * i, four(4 * i));
    x[i] = _mm512_mask_set1_epi32(x[i], 2 << 4 * i, four(4 * i + 1));
    x[i] = _mm512_mask_set1_epi32(x[i], 4 << 4 * i, four(4 * i + 2));
    x[i] = _mm512_mask_set1_epi32(x[i], 8 << 4 * i, four(4 * i + 3));
  });
  return (x[0] | x[1]) | (x[2] | x[3]);
#else
  const auto pair = [&](auto i)
                        ATTNPACK_INLINED { return _mm256_blend_epi32(all_of(four(i)), all_of(four(i + 1)), 2 << i); };
  const Bytes low = _mm256_blend_epi32(pair(Index<0>()), pair(Index<2>()), 0x0c),
              high = _mm256_blend_epi32(pair(Index<4>()), pair(Index<6>()), 0xc0);
  return _mm256_blend_epi32(low, high, 0xf0);
#endif
#endif
}
#endif

}  // namespace attnpack::ATTNPACK_ISA
