#include <attnpack/ops/cpu/isa/dot.h>
#include <attnpack/ops/cpu/isa/softmax.h>

// Decode: few rows, so keys and values are streamed once, as they lie; a unit is a range of keys, and the partial
// results of the ranges are joined at the end (Flash-Decoding, Dao et al. 2023).
namespace attnpack::ATTNPACK_ISA {
namespace {

constexpr int64_t kBlock = 64;     // keys between two updates of the softmax
constexpr int64_t kAhead = 8;      // rows of key or value that are prefetched ahead
constexpr int kColumnVectors = 4;  // vectors of a value row that are accumulated at once

// out[r, d ...] += sum over j of p[r, j] * v[j, d ...], for Vectors whole vectors of columns or the first `some`
// elements of one. Always in vectors, so that every element sees the same arithmetic.
template <class S, class A, int Rows, bool Skip, int Vectors>
inline void add_columns(const A* p, const S* v, int64_t stride, int64_t count, A* out, int64_t ldo,
                        int64_t some = kLanes<A>) {
  Vec<A> sum[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c)
      sum[r][c] = some < kLanes<A> ? load_some<A>(out + r * ldo, some) : load<A>(out + r * ldo + c * kLanes<A>);
  for (int64_t j = 0; j < count; ++j) {
    const S* value = v + j * stride;
    Vec<A> element[Vectors];
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      element[c] = some < kLanes<A> ? load_some<A>(value, some) : load<A>(value + c * kLanes<A>);
      prefetch(value + kAhead * stride, c * kLanes<A>);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const A x = p[r * kBlock + j];
      if (Skip && x == 0 && __builtin_signbit(x)) continue;
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) sum[r][c] += x * element[c];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      if (some == kLanes<A>) store<A>(out + r * ldo + c * kLanes<A>, sum[r][c]);
      for (int64_t i = 0; some < kLanes<A> && i < some; ++i) out[r * ldo + i] = sum[r][c][i];
    }
}

template <class S, class A, int Rows, bool Skip>
inline void add_values(const A* p, const S* v, int64_t stride, int64_t count, int64_t dim, A* out, int64_t ldo) {
  int64_t d = 0;
  for (; d + kColumnVectors * kLanes<A> <= dim; d += kColumnVectors * kLanes<A>)
    add_columns<S, A, Rows, Skip, kColumnVectors>(p, v + d, stride, count, out + d, ldo);
  for (; d + kLanes<A> <= dim; d += kLanes<A>) add_columns<S, A, Rows, Skip, 1>(p, v + d, stride, count, out + d, ldo);
  if (d < dim) add_columns<S, A, Rows, Skip, 1>(p, v + d, stride, count, out + d, ldo, dim - d);
}

// A row's result over a range of keys: max, sum, values[v_head_dim].
inline int64_t partial_size(const AttentionParams& p) { return p.v_head_dim + 2; }

template <class S, class A>
struct Scratch {
  int64_t query_width;
  A *query, *scores;
  Scratch(const AttentionParams& p, Arena& arena) {
    query_width = padded<A>(p.head_dim);
    query = arena.take<A>(kDecodeRows * query_width);
    scores = arena.take<A>(kDecodeRows * kBlock);
  }
};

template <class S, class A>
class DecodeRange {
 public:
  DecodeRange(const AttentionParams& p, int64_t b, int64_t kv_head, void* partial, void* scratch)
      : p_(p), b_(b), kv_head_(kv_head), arena_(scratch), w_(p, arena_), partial_(static_cast<A*>(partial)) {
    make_rows(p, b, kv_head, {0, group_size(p, kv_head) * p.q_len}, tile_);
    pack_rows<A, S>(tile_, p.query, p.query_strides, b, p.head_dim, w_.query, w_.query_width);
  }

  void run(Range keys) {
    keys = {larger(keys.begin, tile_.keys.begin / kBlock * kBlock), smaller(keys.end, tile_.keys.end)};
    attend<false>(keys);
    for (int64_t r = 0; r < tile_.count; ++r)  // an excluded key's NaN or Inf may have come in as 0 * NaN
      if (!all_finite(values(r), 0, 1, p_.v_head_dim)) return attend<true>(keys);
  }

 private:
  A& max(int64_t r) { return partial_[r * partial_size(p_)]; }
  A& sum(int64_t r) { return partial_[r * partial_size(p_) + 1]; }
  A* values(int64_t r) { return partial_ + r * partial_size(p_) + 2; }

  template <bool Skip>
  void attend(Range keys) {
    for (int64_t r = 0; r < tile_.count; ++r) {
      max(r) = A(-kInfinity);
      sum(r) = 0;
      for (int64_t d = 0; d < p_.v_head_dim; ++d) values(r)[d] = 0;
    }
    for (int64_t begin = keys.begin; begin < keys.end; begin += kBlock) {
      const int64_t count = smaller(kBlock, keys.end - begin);
      if constexpr (Skip)
        for (int64_t r = 0; r < tile_.count; ++r) attend_rows<1, Skip>(r, begin, count);
      else
        attend_all_rows(begin, count);
    }
  }

  void attend_all_rows(int64_t begin, int64_t count) {
    int64_t r = 0;
    for (; r + kRowsAtOnce <= tile_.count; r += kRowsAtOnce) attend_rows<kRowsAtOnce, false>(r, begin, count);
    switch (tile_.count - r) {
      case 3:
        return attend_rows<3, false>(r, begin, count);
      case 2:
        return attend_rows<2, false>(r, begin, count);
      case 1:
        return attend_rows<1, false>(r, begin, count);
    }
  }

  template <int Rows, bool Skip>
  void attend_rows(int64_t first, int64_t begin, int64_t count) {
    A* s = w_.scores + first * kBlock;
    const int64_t stride = p_.key_strides.row;
    dot_products<S, A, Rows>(w_.query + first * w_.query_width, w_.query_width,
                             at<S>(p_.key, p_.key_strides, b_, kv_head_, begin), stride, count, p_.head_dim,
                             kAhead * stride, s, kBlock);
    const int64_t whole = (count + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
    A top[kSoftmaxRows<A>] = {}, total[kSoftmaxRows<A>] = {}, factor[kSoftmaxRows<A>];
    for (int r = 0; r < Rows; ++r) {
      finish_scores<A>(p_, b_, tile_.rows[first + r], begin, count, s + r * kBlock);
      top[r] = max(first + r);
      total[r] = sum(first + r);
    }
    online_softmax<A>(s, kBlock, Rows, whole, scale_left<A>(p_), top, total, factor);
    for (int r = 0; r < Rows; ++r) {
      max(first + r) = top[r];
      sum(first + r) = total[r];
      if (p_.dropout_p > 0) drop<A>(p_, b_, tile_.rows[first + r], begin, count, s + r * kBlock);
      if (factor[r] != 1)
        for (int64_t d = 0; d < p_.v_head_dim; ++d) values(first + r)[d] *= factor[r];
    }
    add_values<S, A, Rows, Skip>(s, at<S>(p_.value, p_.value_strides, b_, kv_head_, begin), p_.value_strides.row, count,
                                 p_.v_head_dim, values(first), partial_size(p_));
  }

  const AttentionParams& p_;
  int64_t b_, kv_head_;
  Arena arena_;
  Scratch<S, A> w_;
  A* partial_;
  RowTile tile_;
};

template <class S, class A>
void merge_rows(const AttentionParams& p, int64_t b, int64_t kv_head, const A* partials, int64_t count) {
  const int64_t group = group_size(p, kv_head), rows = group * p.q_len, size = partial_size(p);
  for (int64_t r = 0; r < rows; ++r) {
    const A* parts = partials + r * size;
    const int64_t step = rows * size;
    A top = A(-kInfinity), sum = 0;
    for (int64_t i = 0; i < count; ++i) top = parts[i * step] > top ? parts[i * step] : top;
    // The first part takes the sum: the caller's buffer is scratch.
    A* values = const_cast<A*>(parts) + 2;
    for (int64_t i = 0; i < count; ++i) {
      const A* part = parts + i * step;
      const A weight = part[0] == top ? A(1) : exp_one<A>(part[0] - top);
      sum += part[1] * weight;
      for (int64_t d = 0; d < p.v_head_dim; ++d) values[d] = (i ? values[d] : A(0)) + part[2 + d] * weight;
    }
    finish_row<A, S>(p, b, group_head(p, kv_head, r % group), r / group, top, sum, values);
  }
}

}  // namespace

size_t decode_scratch(const AttentionParams& p) {
  size_t used = 0;
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    Arena arena(nullptr);
    Scratch<decltype(storage), decltype(accumulation)>(p, arena);
    used = arena.used();
  });
  return used;
}

void decode(const AttentionParams& p, int64_t b, int64_t kv_head, Range keys, void* partial, void* scratch) {
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    DecodeRange<decltype(storage), decltype(accumulation)>(p, b, kv_head, partial, scratch).run(keys);
  });
}

void merge(const AttentionParams& p, int64_t b, int64_t kv_head, const void* partials, int64_t count) {
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    using A = decltype(accumulation);
    merge_rows<decltype(storage), A>(p, b, kv_head, static_cast<const A*>(partials), count);
  });
}

}  // namespace attnpack::ATTNPACK_ISA
