#pragma once

#include <attnpack/ops/cpu/isa/tile.h>

// The online softmax (Milakov and Gimelshein 2018): running maximum and sum of a row, and how it ends.
namespace attnpack::ATTNPACK_ISA {

// One row's block of scores -> exp(score - max), in place; -inf (excluded) -> -0.0. Raises max and sum, and returns
// the factor that earlier results of the row are to be multiplied with. count: whole vectors, padded with -inf.
template <class T>
inline T online_softmax(T* s, int64_t count, T& max, T& sum) {
  Vec<T> top = load<T>(s);
  for (int64_t j = kLanes<T>; j < count; j += kLanes<T>) top = select_max<T>(load<T>(s + j), top);
  const T block_max = max_lanes<T>(top);
  const T new_max = block_max > max ? block_max : max;
  Vec<T> total{};
  for (int64_t j = 0; j < count; j += kLanes<T>) {
    const Vec<T> x = load<T>(s + j);
    const Vec<T> e = x == T(-kInfinity) ? broadcast(T(-0.0)) : exp(x - new_max);
    total += e;
    store<T>(s + j, e);
  }
  const T factor = new_max == max ? T(1) : exp_one<T>(max - new_max);
  sum = sum * factor + sum_lanes<T>(total);
  max = new_max;
  return factor;
}

template <class T>
inline void drop(const AttentionParams& p, int64_t b, const Row& row, int64_t begin, int64_t count, T* probs) {
  const T keep = static_cast<T>(1 / (1 - p.dropout_p));
  for (int64_t j = 0; j < count; ++j)
    if (!(probs[j] == 0 && __builtin_signbit(probs[j])))
      probs[j] = dropped(p, b, row, begin + j) ? T(0) : probs[j] * keep;
}

// out = values / sum and lse = max + log(sum), the head's sink taken in; no key at all gives 0 and -inf or the sink.
template <class T, class S>
inline void finish_row(const AttentionParams& p, int64_t b, int64_t head, int64_t query, T max, T sum,
                       const T* values) {
  T factor = 1;
  if (p.sinks) {
    const T sink = static_cast<T>(p.sinks[head]);
    const T top = max > sink ? max : sink;
    if (top != T(-kInfinity)) {
      factor = exp_one<T>(max - top);
      sum = sum * factor + exp_one<T>(sink - top);
    }
    max = top;
  }
  S* out = at<S>(p.out, p.out_strides, b, head, query);
  const T inverse = sum == 0 ? T(0) : factor / sum;
  for (int64_t d = 0; d < p.v_head_dim; ++d) store_one(out + d, values[d] * inverse);
  static_cast<T*>(p.lse)[(b * p.num_heads + head) * p.q_len + query] =
      sum == 0 ? T(-kInfinity) : max + static_cast<T>(__builtin_log(static_cast<double>(sum)));
}

}  // namespace attnpack::ATTNPACK_ISA
