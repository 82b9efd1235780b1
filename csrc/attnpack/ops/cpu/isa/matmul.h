#pragma once

#include <type_traits>

#include <attnpack/ops/cpu/isa/math.h>
#include <attnpack/ops/cpu/isa/rows.h>

// The one matrix product of all tiles: C [M, N] (+)= A [M, K] B [K, N], on padded, packed scratch. N is rounded up to
// whole vectors. C has elements T. A and B have elements E, which is T except in bf16_pairs.h.
namespace attnpack::ATTNPACK_ISA {

// Rows and vectors of the register tile: 12 x 2 fills the 32 registers of AVX-512, 6 x 2 the 16 of the others.
constexpr int kTileRows = kVectorBytes == 64 ? 12 : 6;
constexpr int kTileVectors = 2;
template <class T>
constexpr int64_t kPanel = kTileVectors * kLanes<T>;  // columns of B are padded to a multiple of this

template <class T>
inline int64_t padded(int64_t n) {
  return (n + kPanel<T> - 1) / kPanel<T> * kPanel<T>;
}

// n numbers, rounded up to whole vectors.
template <class T>
constexpr int64_t whole_vectors(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// One step of the sums: an element of A times a vector of a row of B. bf16_pairs.h has another one.
template <class T, class E>
struct Product {
  static Vec<T> add(Vec<T> sum, E x, Vec<E> right) { return sum + x * right; }
  static bool excluded(E x) { return x == 0 && __builtin_signbit(x); }
  // Returns right without the part that an excluded part of x would multiply. Here x has no parts, so right stays as it
  // is.
  static Vec<E> without_excluded(E, Vec<E> right) { return right; }
};

// An operand that is read element by element, by row and column strides. So a transposed operand costs nothing.
template <class T>
struct Operand {
  const T* data;
  int64_t row, column;
  int64_t ahead = 0;         // how many elements ahead to prefetch into the L2 cache meanwhile; 0: none
  int64_t fetched_from = 0;  // the first column that is prefetched
};

// The right-hand side, in panels of kPanel columns: element (k, n) of panel p is data[p * panel + k * row + n].
template <class T>
struct Panels {
  const T* data;
  int64_t row, panel;
  int64_t ahead = 0;               // as in Operand
  int64_t fetched_to = INT64_MAX;  // the column after the last one that is prefetched
  const T* operator[](int64_t k) const { return data + k * row; }
  const T* far(int64_t k) const { return data + k * row + ahead; }
  // The rows from k on of the panel that begins at column n.
  Panels part(int64_t k, int64_t n) const {
    return {data + n / kPanel<T> * panel + k * row, row, panel, n < fetched_to ? ahead : 0};
  }
};

// The same for rows that are listed, whose panels stand side by side.
template <class T>
struct ListedPanels {
  ListedRows<T> rows;
  int64_t ahead = 0;  // in rows
  int64_t fetched_to = INT64_MAX;
  int64_t column = 0;  // where the panel begins
  const T* operator[](int64_t k) const { return rows[k] + column; }
  const T* far(int64_t k) const { return rows[k + ahead] + column; }
  ListedPanels part(int64_t k, int64_t n) const { return {rows.from(k), n < fetched_to ? ahead : 0, 0, n}; }
};

// Work that is done along with the sums. kSkip leaves out terms whose A is -0.0, the mark of an excluded key, because
// that key's row of B may hold NaN. kFetch prefetches as the operands' `ahead` says.
enum class SideWork { kNothing, kSkip, kFetch };

constexpr int64_t kLine = 64;  // bytes of a cache line

// Always inlined: GCC takes a function that only prefetches for one without effects, and drops calls of it.
template <class T>
[[gnu::always_inline]] inline void fetch(const T* p) {
  __builtin_prefetch(p, 0, 2);
}

template <class T, class E, int Rows, int Vectors, SideWork side_work, class B>
inline void register_tile(Operand<E> a, const B& b, T* c, int64_t ldc, int64_t depth, bool accumulate) {
  constexpr int64_t kOfLine = kLine / sizeof(E);
  Vec<T> sum[Rows][Vectors];
  clear(sum);
  for (int64_t k = 0; k < depth; ++k) {
    Vec<E> right[Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) right[v] = load<E>(b[k] + v * kLanes<T>);
    if constexpr (side_work == SideWork::kFetch) {
      if (a.ahead && k % kOfLine == 0)
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) fetch(a.data + r * a.row + k * a.column + a.ahead);
      if (b.ahead)
        for (int64_t i = 0; i < Vectors * kLanes<T>; i += kOfLine) fetch(b.far(k) + i);
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const E x = a.data[r * a.row + k * a.column];
      if (side_work == SideWork::kSkip && Product<T, E>::excluded(x)) continue;
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v)
        sum[r][v] = Product<T, E>::add(
            sum[r][v], x, side_work == SideWork::kSkip ? Product<T, E>::without_excluded(x, right[v]) : right[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      T* to = c + r * ldc + v * kLanes<T>;
      store<T>(to, accumulate ? load<T>(to) + sum[r][v] : sum[r][v]);
    }
}

// The longest chain of sums where short ones are wanted.
constexpr int64_t kShortChain = 8;

// sum = the products of the terms [k, k + depth), where `depth` is at most a short chain.
template <class T, class E, int Rows, int Vectors, class B>
[[gnu::always_inline]] inline void sum_chain(Vec<T> (&sum)[Rows][Vectors], Operand<E> a, const B& b, int64_t k,
                                             int64_t depth) {
  clear(sum);
#pragma GCC unroll 8
  for (int64_t end = k + depth; k < end; ++k) {
    Vec<E> right[Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) right[v] = load<E>(b[k] + v * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v)
        sum[r][v] = Product<T, E>::add(sum[r][v], a.data[r * a.row + k * a.column], right[v]);
  }
}

// A register tile of short chains, whose sums are added up in registers. The bits are those of register_tile on the
// chains one after the other, which would store C and load it again after each of them.
template <class T, class E, int Rows, int Vectors, class B>
inline void chained_tile(Operand<E> a, const B& b, T* c, int64_t ldc, int64_t depth) {
  Vec<T> total[Rows][Vectors], sum[Rows][Vectors];
  const auto add_sum = [&] {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) total[r][v] += sum[r][v];
  };
  int64_t k = depth < kShortChain ? depth : kShortChain;
  sum_chain<T, E>(total, a, b, 0, k);
  for (; k + kShortChain <= depth; k += kShortChain) {
    sum_chain<T, E>(sum, a, b, k, kShortChain);
    add_sum();
  }
  if (k < depth) {
    sum_chain<T, E>(sum, a, b, k, depth - k);
    add_sum();
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) store<T>(c + r * ldc + v * kLanes<T>, total[r][v]);
}

// Is called after each register tile, for work that should not come in one burst. This one does none.
struct Nothing {
  void operator()() const {}
};

template <class T, class E, int Rows, int Vectors, SideWork side_work, class B, class Between>
inline int64_t row_tiles(int64_t begin, int64_t rows, Operand<E> a, B b, T* c, int64_t ldc, int64_t depth,
                         bool accumulate, const Between& between) {
  for (; begin + Rows <= rows; begin += Rows) {
    if (begin > 0) b.ahead = 0;  // the first row of tiles has prefetched it
    register_tile<T, E, Rows, Vectors, side_work>({a.data + begin * a.row, a.row, a.column, a.ahead}, b,
                                                  c + begin * ldc, ldc, depth, accumulate);
    between();
  }
  return begin;
}

// The most rows of B that a panel's register tiles share. With kPanel columns they stay in the L1 cache. Their products
// are summed first, and the sum is then added to C: rounding errors grow with the length of the longest chain of sums.
// If accuracy matters, callers halve that length, which costs little time (PERFORMANCE.md).
constexpr int64_t kDepth = 64;

// If terms are skipped, rows are taken one at a time: that path is rare, and a tile with branches would be slow anyway.
template <class T, class E, int Vectors, SideWork side_work, class B, class Between>
inline void all_rows(int64_t rows, Operand<E> a, const B& b, T* c, int64_t ldc, int64_t depth, bool accumulate,
                     const Between& between) {
  int64_t r = 0;
  if constexpr (side_work != SideWork::kSkip) {
    r = row_tiles<T, E, kTileRows, Vectors, side_work>(r, rows, a, b, c, ldc, depth, accumulate, between);
    r = row_tiles<T, E, 4, Vectors, side_work>(r, rows, a, b, c, ldc, depth, accumulate, between);
  }
  row_tiles<T, E, 1, Vectors, side_work>(r, rows, a, b, c, ldc, depth, accumulate, between);
}

// C = A B in short chains.
template <class T, class E, int Vectors, class B, class Between>
inline void chained_rows(int64_t rows, Operand<E> a, const B& b, T* c, int64_t ldc, int64_t depth,
                         const Between& between) {
  constexpr int kRows = (kRegisters == 32 ? 4 : 3) * (kTileVectors / Vectors);  // sums and totals fill the registers
  int64_t r = 0;
  const auto take = [&](auto some) {
    for (; r + some <= rows; r += some) {
      chained_tile<T, E, some, Vectors>({a.data + r * a.row, a.row, a.column}, b, c + r * ldc, ldc, depth);
      between();
    }
  };
  take(std::integral_constant<int, kRows>());
  take(std::integral_constant<int, 1>());
}

template <class T, class E, SideWork side_work, class B, class Between>
void gemm(int64_t rows, int64_t columns, int64_t depth, Operand<E> a, const B& b, T* c, int64_t ldc, bool accumulate,
          int64_t chain, const Between& between) {
  static_assert(sizeof(E) == sizeof(T), "a vector of B covers as many columns as one of C");
  if (depth == 0 && !accumulate)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t n = 0; n < columns; ++n) c[r * ldc + n] = 0;
  if constexpr (side_work == SideWork::kNothing)
    if (chain == kShortChain && !accumulate && depth > 0) {
      for (int64_t n = 0; n < columns; n += kPanel<T>)
        if (columns - n > kLanes<T>)
          chained_rows<T, E, kTileVectors>(rows, a, b.part(0, n), c + n, ldc, depth, between);
        else
          chained_rows<T, E, 1>(rows, a, b.part(0, n), c + n, ldc, depth, between);
      return;
    }
  for (int64_t n = 0; n < columns; n += kPanel<T>)
    for (int64_t k = 0; k < depth; k += chain) {
      const Operand<E> left{a.data + k * a.column, a.row, a.column, n == 0 && k >= a.fetched_from ? a.ahead : 0};
      const B right = b.part(k, n);
      const int64_t part = depth - k < chain ? depth - k : chain;
      if (columns - n > kLanes<T>)
        all_rows<T, E, kTileVectors, side_work>(rows, left, right, c + n, ldc, part, accumulate || k > 0, between);
      else
        all_rows<T, E, 1, side_work>(rows, left, right, c + n, ldc, part, accumulate || k > 0, between);
    }
}

template <class T, class E = T, class B = Panels<E>, class Between = Nothing>
inline void gemm(bool skip, int64_t rows, int64_t columns, int64_t depth, Operand<E> a, const B& b, T* c, int64_t ldc,
                 bool accumulate, int64_t chain = kDepth, const Between& between = {}) {
  if (skip)
    gemm<T, E, SideWork::kSkip>(rows, columns, depth, a, b, c, ldc, accumulate, chain, between);
  else if (a.ahead || b.ahead)
    gemm<T, E, SideWork::kFetch>(rows, columns, depth, a, b, c, ldc, accumulate, chain, between);
  else
    gemm<T, E, SideWork::kNothing>(rows, columns, depth, a, b, c, ldc, accumulate, chain, between);
}

// Packs a row of any storage type into the accumulation type. Columns are padded with zeros to ld.
template <class A, class S>
inline void pack(const S* from, int64_t columns, A* to, int64_t ld) {
  int64_t c = 0;
  for (; c + kLanes<A> <= columns; c += kLanes<A>) store<A>(to + c, load<A>(from + c));
  for (; c < columns; ++c) to[c] = load_one(from + c);
  for (; c < ld; ++c) to[c] = 0;
}

// Packs rows in panels: columns [p * kPanel, ...) of row r go to `to + (p * height + r) * kPanel`. Missing columns are
// zero.
template <class A, class Rows>
inline void pack_panels(const Rows& from, int64_t rows, int64_t columns, A* to, int64_t height) {
  for (int64_t c = 0; c < columns; c += kPanel<A>)
    for (int64_t r = 0; r < rows; ++r)
      pack(from[r] + c, columns - c < kPanel<A> ? columns - c : kPanel<A>, to + c * height + r * kPanel<A>, kPanel<A>);
}

// How many rows of a block transpose_block reads, if `rows` of them are wanted.
template <class A>
constexpr int64_t rows_read(int64_t rows) {
  return kLanes<A> < 4 ? kLanes<A> : (rows + 3) / 4 * 4;
}

// The lanes of 16 bytes of two vectors: (Odd 0) those with even numbers of a, then those of b; (Odd 1) the odd ones.
template <int Odd>
struct EverySecondLane {
  static constexpr int lane(int p) { return (2 * (p / 4) + Odd) * 4 + p % 4; }
};
// Groups of 4 lanes: the first (Half 0) or second pairs of Width lanes of a and b, in turn.
template <int Lanes, int Width, int Half>
struct PairsInTurn {
  static constexpr int lane(int p) {
    const int in = p % 4;
    return (in / Width % 2 ? Lanes : 0) + p / 4 * 4 + Half * 2 + (Width == 2 ? in % 2 : in / 2);
  }
};

// Transposes kLanes vectors of 4-byte elements: x[c][r] becomes x[r][c].
template <class T>
inline void transpose_vectors(Vec<T>* x) {
  constexpr int kAll = kLanes<T>;
  constexpr auto kPlaces = std::make_integer_sequence<int, kAll>{};
  // The 4 x 4 elements where 4 vectors have the same 16 bytes.
#pragma GCC unroll 4
  for (int i = 0; i < kAll; i += 4) {
    const Vec<T> low = shuffle_by<T, PairsInTurn<kAll, 1, 0>>(x[i], x[i + 1], kPlaces),
                 high = shuffle_by<T, PairsInTurn<kAll, 1, 1>>(x[i], x[i + 1], kPlaces),
                 next_low = shuffle_by<T, PairsInTurn<kAll, 1, 0>>(x[i + 2], x[i + 3], kPlaces),
                 next_high = shuffle_by<T, PairsInTurn<kAll, 1, 1>>(x[i + 2], x[i + 3], kPlaces);
    x[i] = shuffle_by<T, PairsInTurn<kAll, 2, 0>>(low, next_low, kPlaces);
    x[i + 1] = shuffle_by<T, PairsInTurn<kAll, 2, 1>>(low, next_low, kPlaces);
    x[i + 2] = shuffle_by<T, PairsInTurn<kAll, 2, 0>>(high, next_high, kPlaces);
    x[i + 3] = shuffle_by<T, PairsInTurn<kAll, 2, 1>>(high, next_high, kPlaces);
  }
  // Then the pieces of 16 bytes.
#pragma GCC unroll 2
  for (int step = 4; step < kAll; step *= 2) {
    Vec<T> y[kAll];
#pragma GCC unroll 16
    for (int i = 0; i < kAll; ++i) {
      // The pairs are neighbours among the groups of 4 vectors; results with even pieces come first.
      const int group = i / 4, c = i % 4, half = kAll / 8, from = group % half * 2 * 4 + c;
      y[i] = group < half ? shuffle_by<T, EverySecondLane<0>>(x[from], x[from + 4], kPlaces)
                          : shuffle_by<T, EverySecondLane<1>>(x[from], x[from + 4], kPlaces);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kAll; ++i) x[i] = y[i];
  }
}

// to[c * ld + r] = block[r * kLanes + c] for `width` columns and kLanes rows, in pieces of 4 x 4. Rows that are not
// read are zero.
template <class A>
inline void transpose_block(const A* block, int64_t rows, int64_t width, A* to, int64_t ld) {
  constexpr int64_t kBlock = kLanes<A>;
  const int64_t filled = rows_read<A>(rows);
  if constexpr (sizeof(A) == 4)
    if (filled == kBlock) {
      Vec<A> x[kBlock];
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) x[i] = load<A>(block + i * kBlock);
      transpose_vectors<A>(x);
      if (width == kBlock) {
#pragma GCC unroll 16
        for (int i = 0; i < kBlock; ++i) store<A>(to + i * ld, x[i]);
      } else {
        for (int64_t i = 0; i < width; ++i) store<A>(to + i * ld, x[i]);
      }
      return;
    }
  int64_t c = 0;
  if (filled < kBlock)
    for (int64_t i = 0; i < width; ++i) store<A>(to + i * ld, Vec<A>{});
  if constexpr (kBlock >= 4) {
    typedef A Four __attribute__((vector_size(4 * sizeof(A))));
    for (; c + 4 <= width; c += 4)
      for (int64_t r = 0; r < filled; r += 4) {
        Four x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) x[i] = load_bits<Four>(block + (r + i) * kBlock + c);
        const Four even_low = ATTNPACK_SHUFFLE(x[0], x[2], 0, 4, 1, 5),
                   odd_low = ATTNPACK_SHUFFLE(x[1], x[3], 0, 4, 1, 5);
        const Four even_high = ATTNPACK_SHUFFLE(x[0], x[2], 2, 6, 3, 7),
                   odd_high = ATTNPACK_SHUFFLE(x[1], x[3], 2, 6, 3, 7);
        x[0] = ATTNPACK_SHUFFLE(even_low, odd_low, 0, 4, 1, 5);
        x[1] = ATTNPACK_SHUFFLE(even_low, odd_low, 2, 6, 3, 7);
        x[2] = ATTNPACK_SHUFFLE(even_high, odd_high, 0, 4, 1, 5);
        x[3] = ATTNPACK_SHUFFLE(even_high, odd_high, 2, 6, 3, 7);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) __builtin_memcpy(to + (c + i) * ld + r, &x[i], sizeof(Four));
      }
  }
  for (; c < width; ++c)
    for (int64_t r = 0; r < filled; ++r) to[c * ld + r] = block[r * kBlock + c];
}

// The transpose in panels: block p of kPanel rows goes to `to + p * kPanel * columns` as [columns, kPanel]. Missing
// rows are zero. read(r, c, width, x) gives width <= kLanes elements of row r, from column c on.
template <class A, class Read>
inline void transpose_panels(int64_t rows, int64_t columns, A* to, Read&& read) {
  constexpr int64_t kBlock = kLanes<A>;
  A block[kBlock * kBlock];
  for (int64_t r0 = 0; r0 < rows; r0 += kPanel<A>) {
    A* panel = to + r0 * columns;
    for (int64_t half = 0; half < kPanel<A>; half += kBlock) {
      const int64_t present = rows - r0 - half < 0 ? 0 : (rows - r0 - half < kBlock ? rows - r0 - half : kBlock);
      for (int64_t c0 = 0; c0 < columns; c0 += kBlock) {
        const int64_t width = columns - c0 < kBlock ? columns - c0 : kBlock;
        for (int64_t r = 0; r < rows_read<A>(present); ++r)
          if (r < present)
            read(r0 + half + r, c0, width, block + r * kBlock);
          else
            store<A>(block + r * kBlock, Vec<A>{});
        transpose_block(block, present, width, panel + c0 * kPanel<A> + half, kPanel<A>);
      }
    }
  }
}

// from: [rows, columns] of any storage type.
template <class A, class Rows>
inline void pack_transposed(const Rows& from, int64_t rows, int64_t columns, A* to) {
  transpose_panels(rows, columns, to, [&](int64_t r, int64_t column, int64_t width, A* x) {
    const auto* source = from[r] + column;
    if (width == kLanes<A>)
      store<A>(x, load<A>(source));
    else
      for (int64_t c = 0; c < width; ++c) x[c] = load_one(source + c);
  });
}

// to[c, r] = from[r, c]; rows and columns are padded to whole vectors on both sides.
template <class A>
inline void transpose(const A* from, int64_t from_ld, int64_t rows, int64_t columns, A* to, int64_t to_ld) {
  A block[kLanes<A> * kLanes<A>];
  for (int64_t r = 0; r < rows; r += kLanes<A>)
    for (int64_t c = 0; c < columns; c += kLanes<A>) {
      for (int64_t i = 0; i < kLanes<A>; ++i) store<A>(block + i * kLanes<A>, load<A>(from + (r + i) * from_ld + c));
      transpose_block(block, kLanes<A>, kLanes<A>, to + c * to_ld + r, to_ld);
    }
}

// Whether rows x columns hold neither NaN nor Inf: both give NaN when multiplied with 0.
template <class T>
inline bool all_finite(const T* x, int64_t ld, int64_t rows, int64_t columns) {
  const int64_t whole = columns / kLanes<T> * kLanes<T>;
  constexpr int kChains = 4;  // rows that are added up beside one another: in a chain each sum waits for the one before
  Vec<T> sums[kChains]{};
  T rest = 0;
  for (int64_t r = 0; r < rows; r += kChains)
    for (int64_t c = 0; c < whole; c += kLanes<T>)
#pragma GCC unroll 4
      for (int i = 0; i < kChains; ++i) sums[i] += load<T>(x + (r + i < rows ? r + i : r) * ld + c) * T(0);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = whole; c < columns; ++c) rest += x[r * ld + c] * T(0);
  return fold_lanes<T>((sums[0] + sums[1]) + (sums[2] + sums[3]), Add()) + rest == 0;
}

}  // namespace attnpack::ATTNPACK_ISA
