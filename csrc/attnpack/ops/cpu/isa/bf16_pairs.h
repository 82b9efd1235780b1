#pragma once

#include <attnpack/ops/cpu/isa/matmul.h>

// The matrix product on pairs of bf16: two terms per step, summed in fp32. It follows VDPBF16PS (Intel SDM). The second
// product of a pair is added before the first; each product is exact, and each addition rounds to nearest even.
// Subnormal operands count as 0, and a sum that becomes subnormal is 0. So results differ from those of widened numbers
// by less than 2^-126 per term, and an operand below 2^-126 is lost. Both lie far below every tolerance. BFDOT adds
// both products before the sum, and rounds both additions to odd (Arm Architecture Reference Manual, BFDotAdd): the
// last bit of a sum may differ.
namespace attnpack::ATTNPACK_ISA {

using Pair = uint32_t;  // first number in the lower half, as two neighbours lie in memory
template <>
struct VectorTypes<Pair> {
  typedef uint32_t Real __attribute__((vector_size(kVectorBytes)));
};
constexpr Pair kBothExcluded = 0x80008000u;  // -0.0 twice

inline int64_t pairs_of(int64_t n) { return (n + 1) / 2; }
inline Pair pair(BFloat16 first, BFloat16 second) { return first.bits | static_cast<Pair>(second.bits) << 16; }

#if !defined(ATTNPACK_PAIR_INSTRUCTIONS)
inline Vec<float> flushed(Vec<float> x) { return (x < 0.0f ? -x : x) < 0x1p-126f ? x * 0.0f : x; }  // NaN stays
inline Vec<float> firsts(Vec<Pair> x) { return flushed(bit_cast<Vec<float>>(x << 16)); }
inline Vec<float> seconds(Vec<Pair> x) { return flushed(bit_cast<Vec<float>>(x & 0xffff0000u)); }

inline Vec<float> pair_products(Vec<float> sum, Vec<Pair> a, Vec<Pair> b) {
  sum = flushed(flushed(sum) + seconds(a) * seconds(b));
  return flushed(sum + firsts(a) * firsts(b));
}

inline VectorTypes<float>::Half to_bfloat(Vec<float> x) {
  const auto bits = bit_cast<VectorTypes<float>::Bits>(flushed(x));
  const auto rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return __builtin_convertvector(x == x ? rounded : bits >> 16 | 0x40u, VectorTypes<float>::Half);
}
inline Vec<Pair> to_pairs(Vec<float> low, Vec<float> high) {
  const VectorTypes<float>::Half halves[2] = {to_bfloat(low), to_bfloat(high)};
  Vec<Pair> both;
  __builtin_memcpy(&both, halves, sizeof(both));
  return both;
}
#endif

template <>
struct Product<float, Pair> {
  static Vec<float> add(Vec<float> sum, Pair x, Vec<Pair> right) { return pair_products(sum, Vec<Pair>{} + x, right); }
  static bool excluded(Pair x) { return x == kBothExcluded; }
  // Returns right without the half that an excluded half of x would multiply. The sum is then the same as for a finite
  // half.
  static Vec<Pair> without_excluded(Pair x, Vec<Pair> right) {
    return right & (((x & 0xffffu) == 0x8000u ? 0u : 0xffffu) | (x >> 16 == 0x8000u ? 0u : 0xffff0000u));
  }
};

// Reads `width` pairs of a row that has `left` elements left. A missing second element counts as 0.
inline void read_pairs(const BFloat16* from, int64_t left, int64_t width, Pair* to) {
  if (width == kLanes<Pair> && 2 * width <= left) {
    store<Pair>(to, load_bits<Vec<Pair>>(from));
    return;
  }
#if defined(__AVX512BF16__)
  copy_pairs(from, left, width, to);
#else
  for (int64_t i = 0; i < width; ++i) to[i] = pair(from[2 * i], 2 * i + 1 < left ? from[2 * i + 1] : BFloat16{0});
#endif
}

// Packs a row of `columns` elements into ld pairs. Pairs from pairs_of(columns) on are zero.
inline void pack_pairs(const BFloat16* from, int64_t columns, Pair* to, int64_t ld) {
  for (int64_t c = pairs_of(columns); c < ld; ++c) to[c] = 0;
  for (int64_t c = 0; c < pairs_of(columns); c += kLanes<Pair>) {
    const int64_t rest = pairs_of(columns) - c;
    read_pairs(from + 2 * c, columns - 2 * c, rest < kLanes<Pair> ? rest : kLanes<Pair>, to + c);
  }
}

// pack_transposed with pairs along the columns of from: panels of [pairs_of(columns), kPanel].
template <class Rows>
inline void pack_pairs_transposed(const Rows& from, int64_t rows, int64_t columns, Pair* to) {
  transpose_panels(rows, pairs_of(columns), to, [&](int64_t r, int64_t c, int64_t width, Pair* x) {
    read_pairs(from[r] + 2 * c, columns - 2 * c, width, x);
  });
}

// Pairs the columns of two rows into `Vectors` vectors (1 or 2). A null `second` counts as a row of zeros.
template <int Vectors>
inline void pair_rows(const BFloat16* first, const BFloat16* second, Vec<Pair>* to) {
  if constexpr (Vectors == 1) {
    using Half = VectorTypes<float>::Half;
    const Half low = load_bits<Half>(first), high = second ? load_bits<Half>(second) : Half{};
    to[0] = __builtin_convertvector(low, Vec<Pair>) | __builtin_convertvector(high, Vec<Pair>) << 16;
  } else {
    using Wide = Vec<uint16_t>;
    constexpr auto kAll = std::make_integer_sequence<int, kLanes<uint16_t>>{};
    const Wide low = load_bits<Wide>(first), high = second ? load_bits<Wide>(second) : Wide{};
    to[0] = bit_cast<Vec<Pair>>(shuffle_by<uint16_t, Interleaved<kLanes<uint16_t>, 0>>(low, high, kAll));
    to[1] = bit_cast<Vec<Pair>>(shuffle_by<uint16_t, Interleaved<kLanes<uint16_t>, 1>>(low, high, kAll));
  }
}
// The same for one vector of the first `some` columns. The lanes after them are zero.
inline Vec<Pair> pair_rows_some(const BFloat16* first, const BFloat16* second, int64_t some) {
  Vec<Pair> to{};
  if (some >= kLanes<Pair>) {
    pair_rows<1>(first, second, &to);
    return to;
  }
  for (int64_t i = 0; i < some; ++i) to[i] = pair(first[i], second ? second[i] : BFloat16{0});
  return to;
}

// pack_panels with pairs along the rows of from. height counts pairs.
template <class Rows>
inline void pack_pair_panels(const Rows& from, int64_t rows, int64_t columns, Pair* to, int64_t height) {
  static_assert(kPanel<Pair> == 2 * kLanes<Pair>);
  for (int64_t c = 0; c < padded<float>(columns); c += kPanel<Pair>)
    for (int64_t r = 0; r < rows; r += 2) {
      const BFloat16 *first = from[r] + c, *second = r + 1 < rows ? from[r + 1] + c : nullptr;
      Vec<Pair> both[2];
      if (columns - c >= kPanel<Pair>)
        pair_rows<2>(first, second, both);
      else
        for (int64_t i = 0; i < 2; ++i)
          both[i] = pair_rows_some(first + i * kLanes<Pair>, second ? second + i * kLanes<Pair> : nullptr,
                                   columns - c - i * kLanes<Pair>);
      Pair* target = to + c * height + r / 2 * kPanel<Pair>;
      for (int64_t i = 0; i < 2; ++i) store<Pair>(target + i * kLanes<Pair>, both[i]);
    }
}

// The lane of the result at p is a number of the first half of the lanes, or of the second.
struct Zipped {
  static constexpr int lane(int p) { return p / 2 + p % 2 * static_cast<int>(kLanes<Pair>); }
};
// The pairs (x_i, y_i) of to_pairs(x, y).
inline Vec<Pair> zipped(Vec<Pair> x) {
  const auto halves = bit_cast<Vec<uint16_t>>(x);
  constexpr auto kAll = std::make_integer_sequence<int, kLanes<uint16_t>>{};
  return bit_cast<Vec<Pair>>(shuffle_by<uint16_t, Zipped>(halves, halves, kAll));
}

// Rounds count numbers, padded to whole vectors, to pairs of neighbours.
inline void pair_along(const float* x, int64_t count, Pair* to) {
  for (int64_t j = 0; j < count; j += 2 * kLanes<float>) {
    const bool both = j + kLanes<float> < count;
    store<Pair>(to + j / 2, to_pairs(load<float>(x + j), both ? load<float>(x + j + kLanes<float>) : broadcast(-0.0f)));
  }
}

// The same for what pair_along has rounded off: x = to + rest, to 16 bits. Numbers that are excluded stay so.
inline void pair_rest_along(const float* x, const Pair* to, int64_t count, Pair* rest) {
  const auto* rounded = reinterpret_cast<const BFloat16*>(to);
  const auto left = [&](int64_t j) { return -(load<float>(rounded + j) - load<float>(x + j)); };
  for (int64_t j = 0; j < count; j += 2 * kLanes<float>) {
    const bool both = j + kLanes<float> < count;
    store<Pair>(rest + j / 2, to_pairs(left(j), both ? left(j + kLanes<float>) : broadcast(-0.0f)));
  }
}

// Whether rows x columns pairs hold neither NaN nor Inf. Rows are padded with zeros to whole vectors.
inline bool all_finite(const Pair* x, int64_t ld, int64_t rows, int64_t columns) {
  Vec<Pair> found{};
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes<Pair>) {
      const Vec<uint16_t> exponents = bit_cast<Vec<uint16_t>>(load<Pair>(x + r * ld + c)) & 0x7f80;
      found |= bit_cast<Vec<Pair>>(exponents == 0x7f80);
    }
  for (int i = 0; i < kLanes<Pair>; ++i)
    if (found[i]) return false;
  return true;
}

// Rounds the weights of count keys, padded to whole vectors, to pairs (nearest even), and adds the rounded weights to
// the vector at sums. The weighted sum of values is later divided by that sum. So rounding changes the shares of the
// weights, but not their total.
inline void round_weights(const float* x, int64_t count, Pair* to, float* sums) {
  Vec<float> total = load<float>(sums);
  for (int64_t j = 0; j < count; j += 2 * kLanes<float>) {
    const bool both = j + kLanes<float> < count;
    const Vec<Pair> rounded =
        to_pairs(load<float>(x + j), both ? load<float>(x + j + kLanes<float>) : broadcast(-0.0f));
    store<Pair>(to + j / 2, rounded);
    total = pair_products(total, rounded, Vec<Pair>{} + 0x3f803f80u);  // times 1
  }
  store<float>(sums, total);
}

}  // namespace attnpack::ATTNPACK_ISA
