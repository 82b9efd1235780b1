#pragma once

#include <attnpack/ops/cpu/isa/dot.h>

// Weighted sums of values that few rows stream from memory once: the second product of decode.
namespace attnpack::ATTNPACK_ISA {

// The number of keys between two updates of the softmax: kBlock in multiply_block, at most kStreamBlock in
// stream_block.
constexpr int64_t kBlock = 64, kStreamBlock = 256;
constexpr int64_t kAddedBytes = 8 << 10;  // of keys or values that several rows read in turn: they stay in L1

// Rows that follow each other are prefetched into L1, even if keys are also the values (PERFORMANCE.md). Where they lie
// in pages, no hardware prefetches them. Then more of them have to be under way than an L1 cache waits for at a time.
template <class Rows>
constexpr Stream kKeys = Rows::kListed ? Stream{32 << 10, true} : Stream{8 << 10};
// With 16 registers, four rows read the values in columns of two vectors. These are prefetched into L2, because
// prefetching them into L1 is slower (PERFORMANCE.md).
template <int Count, class Rows>
constexpr Stream kValues = Rows::kListed ? kKeys<Rows> : Stream{8 << 10, Count == 4 && kRegisters == 16};

// How many rows of `width` numbers fit into `bytes`: a multiple of `least`, at most `most`.
template <class S>
int64_t rows_that_fit(int64_t bytes, int64_t width, int64_t least, int64_t most) {
  const int64_t fit = bytes / (larger(width, 1) * static_cast<int64_t>(sizeof(S))) / least * least;
  return fit < least ? least : smaller(fit, most);
}

// out[r, d ...] += sum over j of p[r, j] * v[j, d ...], for `Vectors` whole vectors of columns, or for the first `some`
// columns of one vector. All arithmetic is in vectors, so that every element sees the same operations. A row of p has
// kStreamBlock numbers. Along with the sums it prefetches the numbers that lie `ahead`, in the order of their
// addresses: one number for each `Parts` numbers that it reads, or none with 0 parts.
template <class Operands, int Rows, bool Skip, int Parts, int Vectors, class Values, class A>
inline void add_columns(const typename Operands::Element* p, const Values& v, int64_t count, int64_t d, Ahead ahead,
                        A* out, int64_t ldo, int64_t some = kLanes<A>) {
  using E = typename Operands::Element;
  using S = ElementOf<Values>;
  constexpr int kTogether = Vectors % Operands::kTogether == 0 ? Operands::kTogether : 1;
  // kRead: numbers read at once. kRow: numbers of a row.
  constexpr int kStep = static_cast<int>(Operands::kStep), kRead = kStep * kTogether * kLanes<A>;
  constexpr int kRow = Vectors * kLanes<A>;
  constexpr int64_t ldp = kStreamBlock / Operands::kStep;
  Vec<A> sum[Rows][Vectors];
  clear(sum);
  const auto add = [&](int64_t j, const S* value, const S* next) __attribute__((always_inline)) {
    E x[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) x[r] = p[r * ldp + j / Operands::kStep];
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; c += kTogether) {
      const int64_t column = c * kLanes<A>;
      Vec<E> element[kTogether];
      if (Vectors == 1 && some < kLanes<A>)
        element[0] = Operands::below_some(value, next, some);
      else
        Operands::template below<kTogether>(value + column, next ? next + column : nullptr, element);
      if constexpr (Parts > 0) {
        constexpr int kFetched = Parts * kLine / static_cast<int>(sizeof(S));  // numbers read per prefetched line
        const int64_t far_row = j / Parts + ahead.rows;
        const int64_t far_column = d + ahead.columns + (kStep < Parts && j % 2 ? kRow / 2 : 0);
        const int read = c * kStep * kLanes<A>;  // numbers read before this step
#pragma GCC unroll 2
        for (int n = (read + kFetched - 1) / kFetched * kFetched; n < read + kRead; n += kFetched)
          fetch_ahead<kValues<Rows, Values>>(v.ahead(far_row + n / Parts / kRow) + far_column + n / Parts % kRow);
      }
#pragma GCC unroll 2
      for (int k = 0; k < kTogether; ++k)
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
          if (!Skip || !Product<A, E>::excluded(x[r]))
            sum[r][c + k] = Product<A, E>::add(sum[r][c + k], x[r],
                                               Skip ? Product<A, E>::without_excluded(x[r], element[k]) : element[k]);
    }
  };
  int64_t j = 0;
  for (; j + kStep <= count; j += kStep) add(j, v[j] + d, kStep > 1 ? v[j + 1] + d : nullptr);
  if (j < count) add(j, v[j] + d, nullptr);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      A* to = out + r * ldo + d + c * kLanes<A>;
      if (Vectors > 1 || some == kLanes<A>)
        store<A>(to, load<A>(to) + sum[r][c]);
      else
        for (int64_t i = 0; i < some; ++i) to[i] += sum[r][c][i];
    }
}

// How many vectors of columns have their sums in registers.
template <int Rows>
constexpr int kColumns = kRegisters == 32 ? (Rows < 4 ? 8 : 4)
                         : Rows == 1      ? 8
                         : Rows < 4       ? 4
                                          : 2;

template <class Operands, int Rows, bool Skip, int Parts, class Values, class A>
inline void add_rows(const typename Operands::Element* p, const Values& v, int64_t count, int64_t dim, Ahead ahead,
                     A* out, int64_t ldo) {
  // Leaving keys out is rare and slow anyway: it takes no more code than it needs.
  constexpr int kMost = Skip ? 1 : kColumns<Rows>, kLess = kMost < 4 ? kMost : 4;
  int64_t d = 0;
  for (; d + kMost * kLanes<A> <= dim; d += kMost * kLanes<A>)
    add_columns<Operands, Rows, Skip, Parts, kMost>(p, v, count, d, ahead, out, ldo);
  if constexpr (kLess < kMost)
    for (; d + kLess * kLanes<A> <= dim; d += kLess * kLanes<A>)
      add_columns<Operands, Rows, Skip, Parts, kLess>(p, v, count, d, ahead, out, ldo);
  for (; d < dim; d += kLanes<A>)
    add_columns<Operands, Rows, Skip, Parts, 1>(p, v, count, d, ahead, out, ldo, smaller(kLanes<A>, dim - d));
}

// How many values add_values sums before it adds that sum to out: short sums round less than one long sum.
template <class S>
int64_t summed_keys(int64_t v_head_dim) {
  return rows_that_fit<S>(kAddedBytes, v_head_dim, 8, kBlock);
}

// out += weighted values, a few keys at a time. `Rows` rows bring the values, `more` rows after them find them in L1.
template <class Operands, int Rows, bool Skip, class Values, class A>
inline void add_values(const typename Operands::Element* p, const Values& values, int64_t count, int64_t dim, A* out,
                       int64_t ldo, int64_t more) {
  constexpr int64_t ldp = kStreamBlock / Operands::kStep;
  const int64_t step = summed_keys<ElementOf<Values>>(dim);
  const Ahead far =
      prefetch_distance<kValues<Rows, Values>, ElementOf<Values>>(dim, Operands::kStep, values.most_ahead());
  for (int64_t j = 0; j < count; j += step, p += step / Operands::kStep) {
    const int64_t some = smaller(step, count - j);
    const Values v = values.from(j);
    // With 16 registers no row is read whole anyway, and widening each row twice would cost more.
    constexpr bool kHalves = Rows == 4 && kRegisters > 16 && !Skip;
    bool halves = false;
    if constexpr (kHalves) {
      halves = dim > kColumns<Rows> * kLanes<A>;
      // Memory is fastest where rows are read whole. So the first two rows of p read the values from memory, and then
      // the other two read them from the L1 cache.
      if (halves) {
        add_rows<Operands, 2, Skip, 2>(p, v, some, dim, far, out, ldo);
        add_rows<Operands, 2, Skip, 2>(p + 2 * ldp, v, some, dim, {far.rows + some / 2, far.columns}, out + 2 * ldo,
                                       ldo);
      }
    }
    if (!halves) add_rows<Operands, Rows, Skip, 1>(p, v, some, dim, far, out, ldo);
    if constexpr (Rows == kRowsAtOnce && !Skip) {  // fewer rows have no more after them
      int64_t r = Rows;
      for (; r + 2 <= Rows + more; r += 2)
        add_rows<Operands, 2, Skip, 0>(p + r * ldp, v, some, dim, far, out + r * ldo, ldo);
      if (r < Rows + more) add_rows<Operands, 1, Skip, 0>(p + r * ldp, v, some, dim, far, out + r * ldo, ldo);
    }
  }
}

}  // namespace attnpack::ATTNPACK_ISA
