#pragma once

#include <attnpack/ops/cpu/isa/simd.h>

// Dot products of few rows with many that are streamed from memory once: queries with keys, inputs with weights.
namespace attnpack::ATTNPACK_ISA {

constexpr int kRowsAtOnce = 4;  // rows that share a load of what is streamed
// Vectors of what is streamed that some rows meet side by side: their sums stay in registers.
template <int Rows>
constexpr int kBeside = kRegisters == 32 || Rows < 4 ? 4 : 2;

// The first count < kLanes elements, zeros behind them.
template <class A, class S>
inline Vec<A> load_some(const S* p, int64_t count) {
  Vec<A> v{};
  for (int64_t i = 0; i < count; ++i) v[i] = load_one(p + i);
  return v;
}

// One prefetch a cache line, `ahead` elements before its use, into the L2 cache, where more of them can be under way.
template <class S>
inline void prefetch(const S* row, int64_t element, int64_t ahead) {
  if (element * static_cast<int64_t>(sizeof(S)) % 64 == 0) __builtin_prefetch(row + element + ahead, 0, 2);
}

// s[r, j] = x[r] . w[j] for Rows rows of x, padded with zeros to whole vectors, and count rows of w, stride apart.
// ahead: how many elements ahead of its use w is prefetched.
template <class S, class A, int Rows>
inline void dot_products(const A* x, int64_t ldx, const S* w, int64_t stride, int64_t count, int64_t dim, int64_t ahead,
                         A* s, int64_t lds) {
  constexpr int kStreams = kBeside<Rows>;  // rows of w that are read side by side
  const int64_t whole = dim / kLanes<A> * kLanes<A>;
  for (int64_t j = 0; j < count; j += kStreams) {
    const S* row[kStreams];
    for (int i = 0; i < kStreams; ++i) row[i] = w + (j + i < count ? j + i : count - 1) * stride;
    Vec<A> sum[Rows][kStreams];  // set one by one: `= {}` clears it in memory
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kStreams; ++i) sum[r][i] = Vec<A>{};
    for (int64_t d = 0; d < whole; d += kLanes<A>) {
      Vec<A> left[Rows];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) left[r] = load<A>(x + r * ldx + d);
#pragma GCC unroll 4
      for (int i = 0; i < kStreams; ++i) {
        const Vec<A> right = load<A>(row[i] + d);
        prefetch(row[i], d, ahead);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) sum[r][i] += right * left[r];
      }
    }
    if (whole < dim)
      for (int i = 0; i < kStreams; ++i) {
        const Vec<A> right = load_some<A>(row[i] + whole, dim - whole);
        for (int r = 0; r < Rows; ++r) sum[r][i] += right * load<A>(x + r * ldx + whole);
      }
    constexpr int kTogether = Rows == 3 ? 1 : Rows;  // rows whose sums are folded at once
    for (int r = 0; r < Rows; r += kTogether) {
      A total[kTogether * kStreams];
      fold_each<A, kTogether * kStreams>(sum[r], total, Add());
      for (int k = 0; k < kTogether; ++k)
        if (j + kStreams <= count)
          __builtin_memcpy(s + (r + k) * lds + j, total + k * kStreams, kStreams * sizeof(A));
        else
          for (int i = 0; j + i < count; ++i) s[(r + k) * lds + j + i] = total[k * kStreams + i];
    }
  }
}

}  // namespace attnpack::ATTNPACK_ISA
