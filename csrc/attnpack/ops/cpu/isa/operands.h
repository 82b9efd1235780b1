#pragma once

#include <type_traits>

#include <attnpack/ops/cpu/isa/bf16_pairs.h>
#include <attnpack/ops/cpu/isa/softmax.h>

// The operands of the products, for the storage type S and the accumulation type A. An operand has Elements of kStep
// numbers each.
namespace attnpack::ATTNPACK_ISA {

// Loads the first count < kLanes elements. The lanes after them are zero.
template <class A, class S>
inline Vec<A> load_some(const S* p, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<S, float>) return load_first(p, count);
  if constexpr (sizeof(S) == 2) return widen(load_first_halves(p, count), S{});
#endif
  if constexpr (sizeof(S) < sizeof(A)) {
    S some[kLanes<A>] = {};
    for (int64_t i = 0; i < count; ++i) {
      asm("" : "+r"(i));  // else the compiler vectorises the loop, which is longer than it
      some[i] = p[i];
    }
    return load<A>(static_cast<const S*>(some));
  } else {
    Vec<A> v{};
    for (int64_t i = 0; i < count; ++i) v[i] = p[i];
    return v;
  }
}

// Operands whose elements are numbers, widened to the accumulation type.
template <class S, class A>
struct Widened {
  using Element = A;
  static constexpr bool kCoarse = sizeof(S) < sizeof(A);  // whether results are rounded to 16 bit
  static constexpr int64_t kStep = 1;
  static void pack_row(const S* from, int64_t columns, A* to, int64_t ld) { pack(from, columns, to, ld); }
  template <class Rows>
  static void pack_keys(const Rows& from, int64_t rows, int64_t columns, A* to) {
    pack_transposed(from, rows, columns, to);
  }
  template <class Rows>
  static void pack_values(const Rows& from, int64_t rows, int64_t columns, A* to, int64_t height) {
    pack_panels(from, rows, columns, to, height);
  }

  // A vector from one row: kWidth numbers, or the first `some` of them.
  static constexpr int64_t kWidth = kLanes<A>;
  static Vec<A> in_row(const S* p) { return load<A>(p); }
  static Vec<A> in_row(const S* p, int64_t some) { return load_some<A>(p, some); }
  static Vec<A> add(Vec<A> sum, Vec<A> a, Vec<A> b) { return sum + a * b; }

  // Vectors from kStep consecutive rows, one column per lane, or the first `some` columns.
  static constexpr int kTogether = 1;  // vectors that are loaded at once
  template <int Vectors>
  static void below(const S* row, const S*, Vec<A>* to) {
    to[0] = load<A>(row);
  }
  static Vec<A> below_some(const S* row, const S*, int64_t some) { return load_some<A>(row, some); }
};

// Operands whose elements are pairs of bf16. The results of the softmax are rounded to such pairs.
struct Paired {
  using Element = Pair;
  static constexpr bool kCoarse = true;
  static constexpr int64_t kStep = 2;
  static constexpr auto pack_row = pack_pairs;
  template <class Rows>
  static void pack_keys(const Rows& from, int64_t rows, int64_t columns, Pair* to) {
    pack_pairs_transposed(from, rows, columns, to);
  }
  template <class Rows>
  static void pack_values(const Rows& from, int64_t rows, int64_t columns, Pair* to, int64_t height) {
    pack_pair_panels(from, rows, columns, to, height);
  }

  static constexpr int64_t kWidth = 2 * kLanes<Pair>;
  static Vec<Pair> in_row(const BFloat16* p) { return load_bits<Vec<Pair>>(p); }
  static Vec<Pair> in_row(const BFloat16* p, int64_t some) {
    Pair x[kLanes<Pair>] = {};
    read_pairs(p, some, pairs_of(some), x);
    return load_bits<Vec<Pair>>(x);
  }
  static Vec<float> add(Vec<float> sum, Vec<Pair> a, Vec<Pair> b) { return pair_products(sum, a, b); }

  static constexpr int kTogether = 2;
  template <int Vectors>
  static void below(const BFloat16* row, const BFloat16* next, Vec<Pair>* to) {
    pair_rows<Vectors>(row, next, to);
  }
  static constexpr auto below_some = pair_rows_some;
};

template <class S, class A>
using OperandsOf = std::conditional_t<kPairProducts && std::is_same_v<S, BFloat16>, Paired, Widened<S, A>>;

template <class Operands>
constexpr bool kRounds = Operands::kStep > 1;

// Whether rows of `columns` numbers at `base` are rows of elements, which products can read where they are.
template <class Operands, class S>
inline bool are_elements(const void* base, const Strides& s, int64_t columns) {
  using E = typename Operands::Element;
  const auto whole = [](int64_t n) { return n % Operands::kStep == 0; };
  return sizeof(S) * Operands::kStep == sizeof(E) && reinterpret_cast<uintptr_t>(base) % sizeof(E) == 0 &&
         whole(columns) && whole(s.batch) && whole(s.head) && whole(s.row);
}

// How many elements n numbers take.
template <class Operands>
constexpr int64_t steps(int64_t n) {
  return (n + Operands::kStep - 1) / Operands::kStep;
}

// The longest chain of sums in a score (matmul.h). With few keys, rounding errors do not average out, and short chains
// cost little. Padding does not count.
inline int64_t score_chain(const AttentionParams& p, int64_t b) {
  const Range keys = seen_keys(p, b);
  return keys.end - keys.begin <= 32 ? kShortChain : kDepth;
}

// The weights that multiply the values, in rows of ld elements: the results of the softmax, or those rounded to pairs.
// If they are rounded, a vector after each row of out, at offset `sums`, adds up the rounded weights.
template <class Operands>
struct Weights {
  typename Operands::Element* data;
  int64_t ld, sums;
};

// Turns the products of rows [first, first + rows) with keys [begin, begin + count) into weights. Takes kSoftmaxRows
// rows at a time, while they are in the L1 cache.
template <class Operands, class A>
inline void compute_weights(const AttentionParams& p, int64_t b, const RowTile& tile, const RowState<A>& state,
                            const Weights<Operands>& weights, int64_t first, int64_t rows, int64_t begin,
                            int64_t count) {
  if constexpr (!kRounds<Operands>) {
    softmax_rows<Operands::kCoarse>(p, b, tile, state, first, rows, begin, count);
  } else {
    for (int64_t r = first; r < first + rows; r += kSoftmaxRows<A>) {
      const int64_t some = smaller(kSoftmaxRows<A>, first + rows - r);
      softmax_rows<Operands::kCoarse>(p, b, tile, state, r, some, begin, count);
      for (int64_t i = r; i < r + some; ++i)
        round_weights(state.scores + i * state.scores_ld, count, weights.data + i * weights.ld,
                      state.out + i * state.out_ld + weights.sums);
    }
  }
}

// The number by which the weighted sum of values in row r is to be divided. Without dropout it is the sum of the
// rounded weights, which multiplied the values. With dropout the denominator has other terms than that sum, so it is
// the denominator. lse keeps the sum of the unrounded weights, because the backward pass computes the probabilities
// from it.
template <class Operands, class A>
inline A divisor(const AttentionParams& p, const RowState<A>& state, const Weights<Operands>& weights, int64_t r) {
  if constexpr (kRounds<Operands>)
    if (p.dropout_p == 0) return fold_lanes<A>(load<A>(state.out + r * state.out_ld + weights.sums), Add());
  return state.sum[r];
}

// The same for rows [first, first + rows), at most kSoftmaxRows of them.
template <class Operands, class A>
inline void divisors(const AttentionParams& p, const RowState<A>& state, const Weights<Operands>& weights,
                     int64_t first, int64_t rows, A* to) {
  if (!kRounds<Operands> || p.dropout_p > 0) {
    for (int64_t r = 0; r < rows; ++r) to[r] = divisor(p, state, weights, first + r);
    return;
  }
  Vec<A> sums[kSoftmaxRows<A>];
  for (int64_t r = 0; r < kSoftmaxRows<A>; ++r)
    sums[r] = r < rows ? load<A>(state.out + (first + r) * state.out_ld + weights.sums) : Vec<A>{};
  fold_each<A, kSoftmaxRows<A>>(sums, to, Add());
}

}  // namespace attnpack::ATTNPACK_ISA
