#pragma once

#include <attnpack/ops/cpu/isa/operands.h>

// Dot products of few rows with many rows that are streamed from memory once: queries with keys, inputs with weights.
namespace attnpack::ATTNPACK_ISA {

constexpr int kRowsAtOnce = 4;  // rows that share each load of a streamed row

// Calls f with the number of rows, 1 to kRowsAtOnce, as a constant.
template <class F>
inline void with_rows(int64_t rows, F&& f) {
  static_assert(kRowsAtOnce == 4);
  switch (rows) {
    case 4:
      return f(std::integral_constant<int, 4>());
    case 3:
      return f(std::integral_constant<int, 3>());
    case 2:
      return f(std::integral_constant<int, 2>());
    case 1:
      return f(std::integral_constant<int, 1>());
  }
}

// How streamed memory is prefetched: how many bytes ahead, and into which cache. Into L2 if other rows read it `again`,
// else into L1. 0 bytes: nothing is prefetched, because L1 has it.
struct Stream {
  int64_t ahead;
  bool again = false;
};
// Fetches memory that is read once. GCC's hint says how long to keep it: 3 in all caches, 0 only in L1.
// Always inlined: GCC takes a function that only prefetches for one without effects, and drops calls of it.
template <class T>
[[gnu::always_inline]] inline void fetch_once(const T* p) {
  if (kPairProducts || streams_past_l2)
    __builtin_prefetch(p, 0, 0);
  else
    __builtin_prefetch(p, 0, 3);
}
template <Stream stream, class T>
[[gnu::always_inline]] inline void fetch_ahead(const T* p) {
  if constexpr (stream.again)
    fetch(p);
  else if constexpr (stream.ahead > 0)
    fetch_once(p);
}

// How far ahead of its use memory is prefetched: in rows, and in columns of that row.
struct Ahead {
  int64_t rows, columns;
};

// The distance for rows of `columns` numbers when `neighbours` rows are read side by side. At most `most` rows.
template <Stream stream, class S>
Ahead prefetch_distance(int64_t columns, int64_t neighbours, int64_t most) {
  constexpr int64_t kFit = stream.ahead / sizeof(S);
  if (most == 0) return {0, 0};
  if (neighbours == 1 && columns >= kFit) return {0, kFit};
  return {smaller(larger((kFit + columns - 1) / larger(columns, 1), neighbours), most), 0};
}

// to[r, i] = x[r] . w[i], lane by lane, for `Rows` rows of x and `Neighbours` rows of w. A row of `to` has `step`
// vectors. The rows far[i] are prefetched one after the other, in the order of their addresses: one stream reads memory
// faster than several that take turns (PERFORMANCE.md).
template <class Operands, int Rows, int Neighbours, Stream stream, class A, class S>
[[gnu::always_inline]] inline void row_products(const typename Operands::Element* x, int64_t ldx,
                                                const S* const (&w)[Neighbours], const S* const (&far)[Neighbours],
                                                int64_t dim, Vec<A>* to, int step) {
  using E = typename Operands::Element;
  constexpr int64_t kOfLine = kLine / sizeof(S), kStep = larger(Neighbours * Operands::kWidth, kOfLine);
  const int64_t whole = dim / Operands::kWidth * Operands::kWidth;
  const int64_t half = (whole / Neighbours + Operands::kWidth - 1) / Operands::kWidth * Operands::kWidth;
  const S* next = far[0];
  Vec<A> sum[Rows][Neighbours];
  clear(sum);
  const auto add = [&](int64_t d, auto... some) __attribute__((always_inline)) {
    Vec<E> right[Neighbours];
#pragma GCC unroll 2
    for (int i = 0; i < Neighbours; ++i) right[i] = Operands::in_row(w[i] + d, some...);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec<E> left = load_bits<Vec<E>>(x + r * ldx + d / Operands::kStep);
#pragma GCC unroll 2
      for (int i = 0; i < Neighbours; ++i) sum[r][i] = Operands::add(sum[r][i], left, right[i]);
    }
  };
  for (int64_t d = 0; d < whole; d += Operands::kWidth) {
    if (Neighbours > 1 && d == half) next = far[1];
    if (d * Neighbours % kStep == 0) {
#pragma GCC unroll 2
      for (int64_t n = 0; n < kStep; n += kOfLine) fetch_ahead<stream>(next + n);
      next += kStep;
    }
    add(d);
  }
  if (whole < dim) add(whole, dim - whole);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int i = 0; i < Neighbours; ++i) to[r * step + i] = sum[r][i];
}

// The products of `Rows` rows with `Neighbours` rows whose columns are added up in pieces of `Piece`, to[r * step + i].
template <class Operands, int Rows, int Neighbours, Stream stream, int64_t Piece, class A, class S>
inline void piecewise_products(const typename Operands::Element* x, int64_t ldx, const S* const (&w)[Neighbours],
                               const S* const (&far)[Neighbours], int64_t dim, A* to, int step) {
  for (int64_t c = 0; c < dim; c += Piece) {
    const S *row[Neighbours], *next[Neighbours];
    for (int n = 0; n < Neighbours; ++n) row[n] = w[n] + c, next[n] = far[n] + c;
    Vec<A> sum[Rows * Neighbours];
    row_products<Operands, Rows, Neighbours, stream, A>(x + c / Operands::kStep, ldx, row, next,
                                                        smaller(Piece, dim - c), sum, Neighbours);
    constexpr int kSums = Rows * Neighbours, kAtOnce = Rows == 3 ? Neighbours : kSums;  // a power of two
    A pieces[kSums];
#pragma GCC unroll 3
    for (int i = 0; i < kSums; i += kAtOnce) fold_each<A, kAtOnce>(sum + i, pieces + i, Add());
    for (int i = 0; i < kSums; ++i) {
      A& total = to[i / Neighbours * step + i % Neighbours];
      total = c ? total + pieces[i] : pieces[i];
    }
  }
}

// s[r, j] = x[r] . w[j] for `Rows` rows of x and `count` rows of w. The elements of x are padded with zeros to whole
// vectors. The rows of w have dim numbers each. Longer rows than `Piece` columns are added up in pieces, so that the
// sums are those of one call per piece.
template <class Operands, int Rows, Stream stream, int64_t Piece = INT64_MAX, class RowsOfW, class A>
inline void dot_products(const typename Operands::Element* x, int64_t ldx, const RowsOfW& w, int64_t count, int64_t dim,
                         A* s, int64_t lds) {
  using S = ElementOf<RowsOfW>;
  constexpr int kNeighbours = Rows == 1 || kRegisters == 16 ? 1 : 2;  // rows of w that share the loads of x
  constexpr int kFolded = kRegisters == 32 || Rows < 4 ? 4 : 2;       // rows of w whose sums are folded at once
  constexpr int kAtOnce = Rows == 3 ? kFolded : kFolded * Rows;       // a power of two
  const Ahead ahead = prefetch_distance<stream, S>(dim, kNeighbours, w.most_ahead());
  for (int64_t j = 0; j < count; j += kFolded) {
    Vec<A> sum[Rows * kFolded];
    A total[Rows * kFolded];
    const bool whole = Piece == INT64_MAX || dim <= Piece;
#pragma GCC unroll 4
    for (int i = 0; i < kFolded; i += kNeighbours) {
      const int64_t first = j + i < count ? j + i : j;
      const S *row[kNeighbours], *far[kNeighbours];
#pragma GCC unroll 2
      for (int n = 0; n < kNeighbours; ++n) {
        const int64_t place = first + n < count ? first + n : first;
        row[n] = w[place];
        far[n] = w.ahead(place + ahead.rows) + ahead.columns;
      }
      if (whole)
        row_products<Operands, Rows, kNeighbours, stream, A>(x, ldx, row, far, dim, sum + i, kFolded);
      else
        piecewise_products<Operands, Rows, kNeighbours, stream, Piece>(x, ldx, row, far, dim, total + i, kFolded);
    }
#pragma GCC unroll 3
    for (int i = 0; whole && i < Rows * kFolded; i += kAtOnce) fold_each<A, kAtOnce>(sum + i, total + i, Add());
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
      if (j + kFolded <= count)
        __builtin_memcpy(s + r * lds + j, total + r * kFolded, kFolded * sizeof(A));
      else
        for (int i = 0; j + i < count; ++i) s[r * lds + j + i] = total[r * kFolded + i];
  }
}

}  // namespace attnpack::ATTNPACK_ISA
