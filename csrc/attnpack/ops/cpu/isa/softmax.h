#pragma once

#include <attnpack/ops/cpu/isa/tile.h>

// The online softmax (Milakov and Gimelshein 2018): a row's running maximum and sum, and the division at its end.
namespace attnpack::ATTNPACK_ISA {

// How many rows go through the softmax together. Their maxima, sums and factors fill one vector.
template <class T>
constexpr int64_t kSoftmaxRows = kLanes<T> < 4 ? 4 : kLanes<T>;

// How many numbers the maxima and sums of a tile hold: such rows may begin anywhere.
template <class T>
constexpr int64_t kStateRows = kWholeHeadRows + kSoftmaxRows<T>;

template <class T>
inline Vec<T> largest_score(const T* s, int64_t count) {
  constexpr int64_t kChains = 4;  // chains of comparisons: in a chain each waits for the one before
  Vec<T> top[kChains] = {load<T>(s), load<T>(s), load<T>(s), load<T>(s)};
  int64_t j = 0;
  for (; j + kChains * kLanes<T> <= count; j += kChains * kLanes<T>)
#pragma GCC unroll 4
    for (int i = 0; i < kChains; ++i) top[i] = Larger()(load<T>(s + j + i * kLanes<T>), top[i]);
  for (; j < count; j += kLanes<T>) top[0] = Larger()(load<T>(s + j), top[0]);
  return Larger()(Larger()(top[0], top[1]), Larger()(top[2], top[3]));
}

// Turns `Count` vectors of scores into exp(scale * score - max), and -inf into -0.0. Adds each to its total. Coarse:
// for numbers that are stored in 16 bit. Bounded: to 1 at most, for scores whose max comes from other roundings.
template <bool Coarse, bool Bounded, int Count, class T>
inline void exponentials(T* s, T scale, T max, Vec<T>* totals) {
  Vec<T> x[Count];
#pragma GCC unroll 4
  for (int i = 0; i < Count; ++i) {
    // The product is rounded as max was, so that the largest score gives exactly 1.
    const Vec<T> score = unfused(load<T>(s + i * kLanes<T>) * scale);
    // The exponential of an excluded score would lie below the least normal number, where processors are slow.
    x[i] = load<T>(s + i * kLanes<T>) == T(-kInfinity) ? Vec<T>{} : score - max;
    if constexpr (Bounded) x[i] = x[i] > T(0) ? Vec<T>{} : x[i];  // NaN compares false, so it stays
  }
  exp_each<Coarse>(x);
#pragma GCC unroll 4
  for (int i = 0; i < Count; ++i) {
    x[i] = load<T>(s + i * kLanes<T>) == T(-kInfinity) ? broadcast(T(-0.0)) : x[i];
    totals[i] += x[i];
    store<T>(s + i * kLanes<T>, x[i]);
  }
}

// The same for a row of count scores, whole vectors; returns their sum, lane by lane. Four sums, because equal numbers
// err alike as they join one. Each vector joins that of its place, so excluded ones at the end change no bit.
template <bool Coarse, bool Bounded = false, class T>
inline Vec<T> exponentials_of_row(T* s, int64_t count, T scale, T max) {
  Vec<T> totals[4] = {};
  int64_t j = 0;
  for (; j + 4 * kLanes<T> <= count; j += 4 * kLanes<T>) exponentials<Coarse, Bounded, 4>(s + j, scale, max, totals);
  Vec<T> sums[4] = {totals[0], totals[1], totals[2], totals[3]};  // in memory; totals are in registers
  for (Vec<T>* sum = sums; j < count; j += kLanes<T>) exponentials<Coarse, Bounded, 1>(s + j, scale, max, sum++);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The factors of results so far when maxima are raised; 1 where nothing is there yet that could be rescaled.
template <class T>
inline Vec<T> rescaling(Vec<T> old, Vec<T> raised) {
  return (raised == old) | (old == T(-kInfinity)) ? broadcast(T(1)) : exp(old - raised);
}

// Turns a block of scores of up to kSoftmaxRows rows into exp(scale * score - max), in place; -inf (excluded) becomes
// -0.0. Rows lie lds apart; scale > 0. Raises max and sum. factor receives the number by which to multiply the earlier
// results of each row. count: whole vectors, padded with -inf. max, sum and factor hold kSoftmaxRows numbers.
template <bool Coarse, class T>
inline void online_softmax(T* s, int64_t lds, int64_t rows, int64_t count, T scale, T* max, T* sum, T* factor) {
  if (rows == 1) {  // the same bits, without folding vectors that are not there
    const Vec<T> old = broadcast(*max), top = broadcast(fold_lanes<T>(largest_score(s, count), Larger()));
    const Vec<T> raised = Larger()(unfused(scale * top), old);
    const Vec<T> lowered = rescaling<T>(old, raised);
    *max = raised[0];
    *factor = lowered[0];
    const Vec<T> added = broadcast(fold_lanes<T>(exponentials_of_row<Coarse>(s, count, scale, *max), Add()));
    *sum = (broadcast(*sum) * lowered + added)[0];
    return;
  }
  Vec<T> per_row[kSoftmaxRows<T>];
  T folded[kSoftmaxRows<T>];
  for (int64_t r = 0; r < kSoftmaxRows<T>; ++r)
    per_row[r] = r < rows ? largest_score(s + r * lds, count) : broadcast(T(-kInfinity));
  fold_each<T, kSoftmaxRows<T>>(per_row, folded, Larger());
  for (int64_t r = 0; r < kSoftmaxRows<T>; r += kLanes<T>) {
    const Vec<T> old = load<T>(max + r), raised = Larger()(scale * load<T>(folded + r), old);
    store<T>(factor + r, rescaling<T>(old, raised));
    store<T>(max + r, raised);
  }
  for (int64_t r = 0; r < kSoftmaxRows<T>; ++r)
    per_row[r] = r < rows ? exponentials_of_row<Coarse>(s + r * lds, count, scale, max[r]) : Vec<T>{};
  fold_each<T, kSoftmaxRows<T>>(per_row, folded, Add());
  for (int64_t r = 0; r < kSoftmaxRows<T>; r += kLanes<T>)
    store<T>(sum + r, load<T>(sum + r) * load<T>(factor + r) + load<T>(folded + r));
}

// x *= factor, whole vectors.
template <class T>
inline void multiply_row(T* x, int64_t count, T factor) {
  for (int64_t i = 0; i < count; i += kLanes<T>) store<T>(x + i, factor * load<T>(x + i));
}

template <class T>
inline void drop_weights(const AttentionParams& p, int64_t b, const QueryRow& row, int64_t begin, int64_t count,
                         T* probs) {
  const T keep = static_cast<T>(p.kept_factor);
  for (int64_t j = 0; j < count; ++j)
    if (!(probs[j] == 0 && __builtin_signbit(probs[j])))
      probs[j] = dropped(p, b, row, begin + j) ? T(0) : probs[j] * keep;
}

// The state of a tile of up to kWholeHeadRows rows on its way through the keys. max and sum hold kStateRows numbers.
template <class T>
struct RowState {
  T *scores, *out, *max, *sum;
  int64_t scores_ld, out_ld;
};

// kept: the columns of `out` before this one are left as they are, for a caller that writes them before softmax_rows
// may rescale them. Before a row's first keys it rescales nothing (rescaling).
template <class T>
inline void reset_state(const RowState<T>& state, int64_t rows, int64_t kept = 0) {
  for (int64_t r = 0; r < rows + kSoftmaxRows<T>; r += kLanes<T>) {
    store<T>(state.max + r, broadcast(T(-kInfinity)));
    store<T>(state.sum + r, Vec<T>{});
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = kept; c < state.out_ld; ++c) state.out[r * state.out_ld + c] = 0;
}

// Turns the products of rows [first, first + rows) with keys [begin, begin + count) into probabilities that are still
// to be divided by the sum. Rescales the rows' outputs so far to their new maximum.
template <bool Coarse, class T>
inline void softmax_rows(const AttentionParams& p, int64_t b, const RowTile& tile, const RowState<T>& state,
                         int64_t first, int64_t rows, int64_t begin, int64_t count) {
  const int64_t end = first + rows, whole = whole_vectors<T>(count);
  for (; first < end; first += kSoftmaxRows<T>) {
    const int64_t some = smaller(kSoftmaxRows<T>, end - first);
    T* s = state.scores + first * state.scores_ld;
    const QueryRow* row = tile.rows + first;
    for (int64_t r = 0; r < some; ++r) finish_scores<T>(p, b, row[r], begin, count, s + r * state.scores_ld);
    T factor[kSoftmaxRows<T>];
    online_softmax<Coarse>(s, state.scores_ld, some, whole, scale_left<T>(p), state.max + first, state.sum + first,
                           factor);
    for (int64_t r = 0; r < some; ++r) {
      if (p.dropout_p > 0) drop_weights<T>(p, b, row[r], begin, count, s + r * state.scores_ld);
      if (factor[r] != 1) multiply_row(state.out + (first + r) * state.out_ld, state.out_ld, factor[r]);
    }
  }
}

// out = values / divisor and lse = max + log(sum), with the head's sink included. A row without keys gives out = 0, and
// as lse the sink, or -inf without sinks. divisor: the sum of the weights that multiplied the values, if they were
// rounded. log_of_sum: log(sum).
template <class T, class S>
inline void finish_row(const AttentionParams& p, int64_t b, int64_t head, int64_t query, T max, T sum, const T* values,
                       T divisor, T log_of_sum) {
  S* out = at<S>(p.out, p.out_strides, b, head, query);
  T& lse = static_cast<T*>(p.lse)[(b * p.num_heads + head) * p.q_len + query];
  const T sink = p.sinks ? static_cast<T>(p.sinks[head]) : T(-kInfinity);
  if (sum == 0) {
    for (int64_t d = 0; d < p.v_head_dim; ++d) store_one(out + d, T(0));
    lse = sink;
    return;
  }
  T factor = 1;
  if (p.sinks) {
    const T top = max > sink ? max : sink;
    factor = exp_one<T>(max - top);
    sum = sum * factor + exp_one<T>(sink - top);
    divisor = divisor * factor + exp_one<T>(sink - top);
    max = top;
    log_of_sum = log_one(sum);
  }
  // A division rounds once less than a product with the inverse. In 16 bit that rounding is lost.
  const T inverse = factor / divisor;
  const auto finished = [&](auto x) {
    if constexpr (sizeof(S) < sizeof(T))
      return x * inverse;
    else
      return x * factor / divisor;
  };
  int64_t d = 0;
#if defined(ATTNPACK_PAIR_INSTRUCTIONS)
  if constexpr (std::is_same_v<S, BFloat16>)
    for (; d + kLanes<T> <= p.v_head_dim; d += kLanes<T>)
      if (!store_rounded(out + d, finished(load<T>(values + d)))) break;
#endif
  for (; d < p.v_head_dim; ++d) store_one(out + d, finished(values[d]));
  lse = max + log_of_sum;
}
template <class T, class S>
inline void finish_row(const AttentionParams& p, int64_t b, int64_t head, int64_t query, T max, T sum,
                       const T* values) {
  finish_row<T, S>(p, b, head, query, max, sum, values, sum, log_one(sum));
}

}  // namespace attnpack::ATTNPACK_ISA
