#pragma once

#include <cstdint>
#include <utility>

// Whether the file below has bf16 and fp16 as vectors, bytes as lanes, and products of pairs of bf16.
#if defined(__F16C__)
#include <attnpack/ops/cpu/isa/simd_x86.h>
#define ATTNPACK_HALF_INSTRUCTIONS
#elif defined(__aarch64__)
#include <attnpack/ops/cpu/isa/simd_arm.h>
#define ATTNPACK_HALF_INSTRUCTIONS
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define ATTNPACK_PAIR_INSTRUCTIONS
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define ATTNPACK_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
// __builtin_shuffle wants the lane numbers as a vector of integers. A comparison has that type.
#define ATTNPACK_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype((a) == (b)){__VA_ARGS__})
#endif

// Vectors of the widest kind that this instruction set has, by the compilers' vector extensions. The same source gives
// SSE2, AVX2, AVX-512 or NEON code. Each instruction set has its own namespace, so that no symbol is shared.
namespace attnpack::ATTNPACK_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Whether bf16 is multiplied in pairs. The emulation is slower than widening: it is only for tests.
#if defined(ATTNPACK_PAIR_INSTRUCTIONS) || defined(ATTNPACK_EMULATE_PAIRS)
constexpr bool kPairProducts = true;
#else
constexpr bool kPairProducts = false;
#endif

// The number of vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class T>
struct VectorTypes;
template <>
struct VectorTypes<float> {
  typedef float Real __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
};
template <>
struct VectorTypes<double> {
  typedef double Real __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
};

template <>
struct VectorTypes<uint16_t> {
  typedef uint16_t Real __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vec = typename VectorTypes<T>::Real;
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class V, class T>
inline V load_bits(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// x - 0 keeps the sign of -0.0; 0 + x would lose it.
template <class T>
inline Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

inline Vec<float> widen(VectorTypes<float>::Half half, BFloat16) {
#if defined(ATTNPACK_HALF_INSTRUCTIONS)
  return bfloat_to_float(half);
#else
  return bit_cast<Vec<float>>(__builtin_convertvector(half, VectorTypes<float>::Bits) << 16);
#endif
}
inline Vec<float> widen(VectorTypes<float>::Half half, Float16) {
#if defined(ATTNPACK_HALF_INSTRUCTIONS)
  return half_to_float(half);
#else
  using Bits = VectorTypes<float>::Bits;
  const Bits h = __builtin_convertvector(half, Bits);
  const Bits sign = (h & 0x8000u) << 16;
  const Vec<float> scaled = bit_cast<Vec<float>>((h & 0x7fffu) << 13) * 0x1p112f;  // exact, subnormals too
  const Bits special = (h & 0x7fffu) >= 0x7c00u ? ((h & 0x7fffu) << 13) | 0x7f800000u : bit_cast<Bits>(scaled);
  return bit_cast<Vec<float>>(special | sign);
#endif
}
// sum[r][c] = 0, in registers: `= {}` clears them in memory.
template <class V, int Rows, int Columns>
inline void clear(V (&sum)[Rows][Columns]) {
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Columns; ++c) sum[r][c] = V{};
}

// kLanes<A> elements of storage type S, widened to the accumulation type A.
template <class A, class S>
inline Vec<A> load(const S* p) {
  if constexpr (sizeof(S) == sizeof(A))
    return load_bits<Vec<A>>(p);
  else
    return widen(load_bits<VectorTypes<float>::Half>(p), S{});
}

template <class T>
inline void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

// One element, to and from the accumulation type; rounding to nearest even.
inline double load_one(const double* p) { return *p; }
inline float load_one(const float* p) { return *p; }
inline uint32_t load_one(const uint32_t* p) { return *p; }
inline float load_one(const BFloat16* p) { return bit_cast<float>(static_cast<uint32_t>(p->bits) << 16); }
inline float load_one(const Float16* p) {
  const uint32_t h = p->bits, magnitude = (h & 0x7fffu) << 13;
  const float scaled = bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t bits = (h & 0x7fffu) >= 0x7c00u ? magnitude | 0x7f800000u : bit_cast<uint32_t>(scaled);
  return bit_cast<float>(bits | (h & 0x8000u) << 16);
}
inline void store_one(double* p, double x) { *p = x; }
inline void store_one(float* p, float x) { *p = x; }
inline void store_one(BFloat16* p, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  p->bits = static_cast<uint16_t>(nan ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline void store_one(Float16* p, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // rounds to infinity
  } else if (magnitude < 0x38800000u) {
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;  // subnormal: 0.5 has ulp 2^-24
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  }
  p->bits = static_cast<uint16_t>(half | sign);
}

// Shuffles by a rule: lane p of the result is lane Rule::lane(p) of a, followed by b.
template <class T, class Rule, int... Lane>
inline Vec<T> shuffle_by(Vec<T> a, Vec<T> b, std::integer_sequence<int, Lane...>) {
  return ATTNPACK_SHUFFLE(a, b, Rule::lane(Lane)...);
}

// The first (Half 0) or second halves of groups of `Group` lanes, in turn one of a and one of b.
template <int Lanes, int Group, int Half>
struct Halves {
  static constexpr int lane(int p) {
    const int half = Group / 2, group = p / half;
    return (group % 2 ? Lanes : 0) + group / 2 * Group + Half * half + p % half;
  }
};
// The lanes of the first (Half 0) or second half of a, each followed by the same lane of b.
template <int Lanes, int Half>
struct Interleaved {
  static constexpr int lane(int p) { return Half * Lanes / 2 + p / 2 + p % 2 * Lanes; }
};
// The other half of each group of Group lanes.
template <int Group>
struct OtherHalf {
  static constexpr int lane(int p) { return p ^ Group / 2; }
};

// Folds `Count` vectors, a power of two, into one vector with groups of kLanes / Count lanes. The first lane of group i
// is fold_lanes(v[i]).
template <class T, int Count, int Group, class Fold>
inline Vec<T> fold_groups(Vec<T>* v, Fold fold) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes<T>>{};
  if constexpr (Count > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < Count / 2; ++i)
      v[i] = fold(shuffle_by<T, Halves<kLanes<T>, Group, 0>>(v[i], v[i + Count / 2], kAll),
                  shuffle_by<T, Halves<kLanes<T>, Group, 1>>(v[i], v[i + Count / 2], kAll));
    return fold_groups<T, Count / 2, Group / 2>(v, fold);
  } else if constexpr (Group > 1) {
    v[0] = fold(v[0], shuffle_by<T, OtherHalf<Group>>(v[0], v[0], kAll));
    return fold_groups<T, 1, Group / 2>(v, fold);
  } else {
    return v[0];
  }
}

// out[i] = fold_lanes(v[i]) for `Count` vectors, a power of two. v is overwritten. Inlined, because v would otherwise
// have to be in memory.
template <class T, int Count, class Fold>
[[gnu::always_inline]] inline void fold_each(Vec<T>* v, T* out, Fold fold) {
  constexpr int kTogether = Count < kLanes<T> ? Count : kLanes<T>, kStep = kLanes<T> / kTogether;
#pragma GCC unroll 8
  for (int first = 0; first < Count; first += kTogether) {
    const Vec<T> folded = fold_groups<T, kTogether, kLanes<T>>(v + first, fold);
    if constexpr (kStep == 1) {
      store<T>(out + first, folded);
    } else {
      T lanes[kLanes<T>];
      store<T>(lanes, folded);
#pragma GCC unroll 16
      for (int i = 0; i < kTogether; ++i) out[first + i] = lanes[i * kStep];
    }
  }
}

// Folds the lanes of one vector into one number.
template <class T, class Fold>
inline T fold_lanes(Vec<T> v, Fold fold) {
  return fold_groups<T, 1, kLanes<T>>(&v, fold)[0];
}

// Folds of two vectors, lane by lane. Larger may drop a NaN; the sum of exponentials carries it.
struct Add {
  template <class V>
  V operator()(V a, V b) const {
    return a + b;
  }
};
struct Larger {
  template <class V>
  V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};

}  // namespace attnpack::ATTNPACK_ISA
