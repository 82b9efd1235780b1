#pragma once

#include <cmath>

#include <attnpack/core/dropout.h>
#include <attnpack/ops/cuda/kernels/plan.h>
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
static_assert(sizeof(Row) == kRowBytes);

// Functions of a sequence take its number: the batch, or that of a packed sequence. Its rows and keys are counted from
// its first ones. Only Row::query counts the rows of all packed sequences, because memory does.
ATTNPACK_HD inline int64_t count_head_rows(const AttentionParams& p, int64_t sequence, int64_t kv_head) {
  return group_size(p, kv_head) * count_queries(p, sequence);
}

// Row `index` of a kv head: index = query * group_size + member. A row past the last one has no keys.
ATTNPACK_HD inline Row make_row(const AttentionParams& p, int64_t sequence, int64_t kv_head, int64_t index) {
  const int64_t group = group_size(p, kv_head);
  const Range queries = queries_of(p, sequence);
  if (index >= group * queries.count()) return {0, 0, 0, 0, 0};
  const int64_t query = index / group;
  const Range keys = key_range(p, sequence, query);
  const bool some = keys.begin < keys.end;
  return {static_cast<int32_t>(group_head(p, kv_head, index % group)), static_cast<int32_t>(queries.begin + query),
          some ? static_cast<int32_t>(keys.begin) : 0, some ? static_cast<int32_t>(keys.end) : 0,
          query + first_position(p, sequence)};
}

// The keys that rows [first, first + count) of one kv head see. The ranges of later queries never begin or end earlier,
// and a row's number grows with its query. A window past the keys leaves an empty range after their end. That range
// must not be read, so it becomes [0, 0).
ATTNPACK_HD inline Range hull(const AttentionParams& p, int64_t sequence, int64_t kv_head, int64_t first,
                              int64_t count) {
  const int64_t group = group_size(p, kv_head), rows = count_head_rows(p, sequence, kv_head);
  if (first >= rows) return {0, 0};
  const int64_t last = (first + count < rows ? first + count : rows) - 1;
  const int64_t valid = valid_keys(p, sequence);
  const Range keys{key_range(p, sequence, first / group).begin, key_range(p, sequence, last / group).end};
  if (keys.begin >= valid) return {0, 0};
  return {keys.begin, keys.end < valid ? keys.end : valid};
}

// The rows of a kv head that see any of these keys, by their ranges.
ATTNPACK_HD inline Range rows_that_see(const AttentionParams& p, int64_t sequence, int64_t kv_head, const Range& keys) {
  // The first query for which `past` holds. It holds for all queries after that one too.
  const auto first = [&](const auto& past) {
    int64_t low = 0, high = count_queries(p, sequence);
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      past(key_range(p, sequence, middle)) ? high = middle : low = middle + 1;
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

// A mask's number for one pair. It excludes the key if it holds -inf before any rounding.
template <class A>
struct MaskValue {
  A value;
  bool excludes;
};
template <class A, class M>
ATTNPACK_HD inline MaskValue<A> mask_value(M number) {
  if constexpr (std::is_same_v<M, bool>) {
    return {A(0), !number};
  } else {
    const auto x = widen(number);
    return {static_cast<A>(x), x == -infinity<decltype(x + 0)>()};
  }
}
// Calls f with one value of the mask's type.
template <class F>
ATTNPACK_HD inline auto with_mask_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double{});
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat16:
      return f(Float16{});
    default:
      return f(bool{});
  }
}

// The numbers that all scores of a call share, and those that the scores of a row share, in the type to compute with.
template <class A>
struct ScoreRule {
  A scale, cap, into_cap;
};
template <class A>
ATTNPACK_HD inline ScoreRule<A> score_rule(const AttentionParams& p) {
  return {static_cast<A>(p.scale), static_cast<A>(p.softcap), p.softcap > 0 ? scale_into_cap<A>(p) : A(0)};
}
template <class A>
struct RowRule {
  A slope;       // of ALiBi
  int64_t mask;  // where the mask's row begins, in elements
};
template <class A>
ATTNPACK_HD inline RowRule<A> row_rule(const AttentionParams& p, int64_t b, const Row& row) {
  return {p.alibi_slopes ? static_cast<A>(p.alibi_slopes[row.head]) : A(0),
          p.mask ? b * p.mask_strides.batch + row.head * p.mask_strides.head + row.query * p.mask_strides.row : 0};
}

// cap tanh(scaled / cap). cap_slope, if given, receives d(capped) / d(scaled).
template <class A>
ATTNPACK_HD inline A capped_score(const ScoreRule<A>& rule, A product, A* cap_slope = nullptr) {
  const A t = std::tanh(product * rule.into_cap);
  if (cap_slope) *cap_slope = A(1) - t * t;
  return rule.cap * t;
}

// The score of one pair, or -inf where the key is excluded, whatever `product` holds. cap_slope as in capped_score.
template <class A>
ATTNPACK_HD inline A finish_score(const AttentionParams& p, const ScoreRule<A>& rule, const RowRule<A>& of_row,
                                  const Row& row, int64_t key, A product, A* cap_slope = nullptr) {
  if (key < row.begin || key >= row.end) return -infinity<A>();
  A score = p.softcap > 0 ? capped_score(rule, product, cap_slope) : rule.scale * product;
  if (p.alibi_slopes) {
    const int64_t distance = row.position < key ? key - row.position : row.position - key;
    score -= of_row.slope * static_cast<A>(distance);
  }
  if (p.mask) {
    const int64_t offset = of_row.mask + key * p.mask_strides.column;
    const auto mask = with_mask_type(
        p.mask_dtype, [&](auto type) { return mask_value<A>(static_cast<const decltype(type)*>(p.mask)[offset]); });
    score = mask.excludes ? -infinity<A>() : score + mask.value;
  }
  return score;
}
template <class A>
ATTNPACK_HD inline A finish_score(const AttentionParams& p, int64_t b, const Row& row, int64_t key, A product,
                                  A* cap_slope = nullptr) {
  return finish_score(p, score_rule<A>(p), row_rule<A>(p, b, row), row, key, product, cap_slope);
}
// Whether range and mask leave the key to the row.
ATTNPACK_HD inline bool row_sees(const AttentionParams& p, int64_t b, const Row& row, int64_t key) {
  return finish_score(p, b, row, key, 0.f) != -infinity<float>();
}

// The factor with which dropout multiplies a probability.
template <class A>
ATTNPACK_HD inline A dropout_factor(const AttentionParams& p, int64_t b, const Row& row, int64_t key) {
  return dropped(p, b, row.head, row.query, key) ? A(0) : static_cast<A>(p.kept_factor);
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
  return {factor, row.sum, row.max + std::log(row.sum)};
}

}  // namespace attnpack::cuda
