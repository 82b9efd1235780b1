#pragma once

#include <cmath>

#include <attnpack/core/dropout.h>
#include <attnpack/ops/cuda/kernels/numbers.cuh>

// Turns a product q.k into the score that the softmax sees, one pair at a time: scale, softcap, ALiBi, mask, ranges. It
// also ends a row's softmax. Order and meaning are those of cpu/isa/scores.h and softmax.h.
namespace attnpack::cuda {

// One row of a tile: its query, and the keys that its ranges leave; [0, 0) if they leave none. The numbers have 32 bits
// where that suffices, because a lane holds two rows in registers.
struct Row {
  int32_t head, query, begin, end;
  int64_t position;
};

// Row `index` of a kv head: index = query * group_size + member. A row past the last one has no keys.
ATTNPACK_HD inline Row make_row(const AttentionParams& p, int64_t b, int64_t kv_head, int64_t index) {
  const int64_t group = group_size(p, kv_head);
  if (index >= group * p.q_len) return {0, 0, 0, 0, 0};
  const int64_t query = index / group;
  const Range keys = key_range(p, b, query);
  const bool some = keys.begin < keys.end;
  return {static_cast<int32_t>(group_head(p, kv_head, index % group)), static_cast<int32_t>(query),
          some ? static_cast<int32_t>(keys.begin) : 0, some ? static_cast<int32_t>(keys.end) : 0,
          query + (p.q_offsets ? p.q_offsets[b] : p.q_offset)};
}

// The keys that rows [first, first + count) of one kv head see. The ranges of later queries never begin or end earlier,
// and a row's number grows with its query. A window past the keys leaves an empty range after their end. That range
// must not be read, so it becomes [0, 0).
ATTNPACK_HD inline Range hull(const AttentionParams& p, int64_t b, int64_t kv_head, int64_t first, int64_t count) {
  const int64_t group = group_size(p, kv_head), rows = group * p.q_len;
  if (first >= rows) return {0, 0};
  const int64_t last = (first + count < rows ? first + count : rows) - 1;
  const int64_t valid = valid_keys(p, b);
  const Range keys{key_range(p, b, first / group).begin, key_range(p, b, last / group).end};
  if (keys.begin >= valid) return {0, 0};
  return {keys.begin, keys.end < valid ? keys.end : valid};
}

// The rows of a kv head that see any of these keys, by their ranges.
ATTNPACK_HD inline Range rows_that_see(const AttentionParams& p, int64_t b, int64_t kv_head, const Range& keys) {
  // The first query for which `past` holds. It holds for all queries after that one too.
  const auto first = [&](const auto& past) {
    int64_t low = 0, high = p.q_len;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      past(key_range(p, b, middle)) ? high = middle : low = middle + 1;
    }
    return low;
  };
  const int64_t begin = first([&](const Range& seen) { return seen.end > keys.begin; }),
                end = first([&](const Range& seen) { return seen.begin >= keys.end; });
  const int64_t group = group_size(p, kv_head);
  return begin < end ? Range{begin * group, end * group} : Range{0, 0};
}

// The keys in both ranges, or [0, 0) if there are none: kernels round the beginning down, and must not find keys there.
ATTNPACK_HD inline Range intersection(Range a, Range b) {
  const Range r{a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
  return r.begin < r.end ? r : Range{0, 0};
}

template <class A>
ATTNPACK_HD inline A mask_value(const AttentionParams& p, int64_t offset) {
  switch (p.mask_dtype) {
    case DType::kFloat64:
      return static_cast<A>(static_cast<const double*>(p.mask)[offset]);
    case DType::kFloat32:
      return static_cast<A>(static_cast<const float*>(p.mask)[offset]);
    case DType::kBFloat16:
      return static_cast<A>(widen(static_cast<const BFloat16*>(p.mask)[offset]));
    case DType::kFloat16:
      return static_cast<A>(widen(static_cast<const Float16*>(p.mask)[offset]));
    default:
      return static_cast<const bool*>(p.mask)[offset] ? A(0) : -infinity<A>();
  }
}
// Whether the mask excludes a key: it holds -inf before any rounding.
ATTNPACK_HD inline bool mask_excludes(const AttentionParams& p, int64_t offset) {
  return p.mask_dtype == DType::kFloat64 ? static_cast<const double*>(p.mask)[offset] == -infinity<double>()
                                         : mask_value<float>(p, offset) == -infinity<float>();
}

// Whether scores need a scale above 0 and nothing else but the row's range.
ATTNPACK_HD inline bool only_scaled(const AttentionParams& p) {
  return p.softcap == 0 && !p.alibi_slopes && !p.mask && p.scale > 0;
}

// The score of one pair, or -inf where the key is excluded, whatever `product` holds. cap_slope, if given, receives
// d(capped) / d(scaled).
template <class A>
ATTNPACK_HD inline A finish_score(const AttentionParams& p, int64_t b, const Row& row, int64_t key, A product,
                                  A* cap_slope = nullptr) {
  if (key < row.begin || key >= row.end) return -infinity<A>();
  A score = static_cast<A>(p.scale) * product;
  if (p.softcap > 0) {
    const A cap = static_cast<A>(p.softcap), t = std::tanh(product * scale_into_cap<A>(p));
    score = cap * t;
    if (cap_slope) *cap_slope = A(1) - t * t;
  }
  if (p.alibi_slopes) {
    const int64_t distance = row.position < key ? key - row.position : row.position - key;
    score -= static_cast<A>(p.alibi_slopes[row.head]) * static_cast<A>(distance);
  }
  if (p.mask) {
    const int64_t offset = b * p.mask_strides.batch + row.head * p.mask_strides.head + row.query * p.mask_strides.row +
                           key * p.mask_strides.column;
    if (mask_excludes(p, offset)) return -infinity<A>();
    score += mask_value<A>(p, offset);
  }
  return score;
}

// The factor with which dropout multiplies a probability.
template <class A>
ATTNPACK_HD inline A dropout_factor(const AttentionParams& p, int64_t b, const Row& row, int64_t key) {
  return dropped(p, b, row.head, row.query, key) ? A(0) : static_cast<A>(1 / (1 - p.dropout_p));
}

// The online softmax (Milakov and Gimelshein 2018): a row's maximum and the sum of exp(score - max).
template <class A>
struct Softmax {
  A max, sum;
};

// Joins two parts of a row. The parts' values are to be multiplied with *left and *right.
template <class A>
ATTNPACK_HD inline Softmax<A> merge(Softmax<A> a, Softmax<A> b, A* left, A* right) {
  const A top = larger(a.max, b.max);
  *left = a.max == top ? A(1) : std::exp(a.max - top);
  *right = b.max == top ? A(1) : std::exp(b.max - top);
  return {top, a.sum * *left + b.sum * *right};
}

// out = values * factor / divisor.
template <class A>
struct RowEnd {
  A factor, divisor, lse;
};

// Ends a row's softmax, with the head's sink included. A row without keys gives 0, and as lse the sink, or -inf without
// sinks.
template <class A>
ATTNPACK_HD inline RowEnd<A> end_row(const AttentionParams& p, int64_t head, Softmax<A> row) {
  const A sink = p.sinks ? static_cast<A>(p.sinks[head]) : -infinity<A>();
  if (row.sum == 0) return {0, 1, sink};
  A factor = 1;
  if (p.sinks) {
    const A top = larger(row.max, sink);
    factor = std::exp(row.max - top);
    row.sum = row.sum * factor + std::exp(sink - top);
    row.max = top;
  }
  return {factor, row.sum, row.max + static_cast<A>(std::log(static_cast<double>(row.sum)))};
}

}  // namespace attnpack::cuda
