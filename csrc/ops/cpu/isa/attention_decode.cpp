#include <attnpack/ops/cpu/isa/dot.h>
#include <attnpack/ops/cpu/isa/softmax.h>

// Decode: few rows, so keys and values are streamed once, as they lie; a unit is a range of keys, and the partial
// results of the ranges are joined at the end (Flash-Decoding, Dao et al. 2023).
namespace attnpack::ATTNPACK_ISA {
namespace {

constexpr int64_t kBlock = 64;            // keys between two updates of the softmax
constexpr int64_t kAheadBytes = 8 << 10;  // of keys or values: so many are prefetched ahead

// Rows of so many elements in kAheadBytes, but 8 to kBlock.
template <class S>
int64_t rows_ahead(int64_t width) {
  const int64_t fit = kAheadBytes / (larger(width, 1) * static_cast<int64_t>(sizeof(S)));
  return fit < 8 ? 8 : fit < kBlock ? fit : kBlock;
}

// out[r, d ...] += sum over j of p[r, j] * v[j, d ...], for Vectors whole vectors of columns or the first `some`
// elements of one. Always in vectors, so that every element sees the same arithmetic.
template <class S, class A, int Rows, bool Skip, int Vectors>
inline void add_columns(const A* p, const S* v, int64_t stride, int64_t count, int64_t ahead, A* out, int64_t ldo,
                        int64_t some = kLanes<A>) {
  Vec<A> sum[Rows][Vectors];  // set one by one: `= {}` clears it in memory
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) sum[r][c] = Vec<A>{};
  for (int64_t j = 0; j < count; ++j) {
    const S* value = v + j * stride;
    Vec<A> element[Vectors];
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      element[c] = some < kLanes<A> ? load_some<A>(value, some) : load<A>(value + c * kLanes<A>);
      prefetch(value, c * kLanes<A>, ahead);
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
      A* to = out + r * ldo + c * kLanes<A>;
      if (some == kLanes<A>) store<A>(to, load<A>(to) + sum[r][c]);
      for (int64_t i = 0; some < kLanes<A> && i < some; ++i) to[i] += sum[r][c][i];
    }
}

// A few keys at a time: columns are gone through one after the other, and so are the lines of a few rows; and sums of
// few terms, added up, round less than one long sum.
template <class S, class A, int Rows, bool Skip>
inline void add_values(const A* p, const S* v, int64_t stride, int64_t count, int64_t dim, A* out, int64_t ldo) {
  constexpr int kColumnVectors = kBeside<Rows>;  // that are accumulated at once
  const int64_t step = rows_ahead<S>(dim), ahead = step * stride;
  for (int64_t j = 0; j < count; j += step, p += step, v += ahead) {
    const int64_t some = smaller(step, count - j);
    int64_t d = 0;
    for (; d + kColumnVectors * kLanes<A> <= dim; d += kColumnVectors * kLanes<A>)
      add_columns<S, A, Rows, Skip, kColumnVectors>(p, v + d, stride, some, ahead, out + d, ldo);
    for (; d + kLanes<A> <= dim; d += kLanes<A>)
      add_columns<S, A, Rows, Skip, 1>(p, v + d, stride, some, ahead, out + d, ldo);
    if (d < dim) add_columns<S, A, Rows, Skip, 1>(p, v + d, stride, some, ahead, out + d, ldo, dim - d);
  }
}

// A row's result over a range of keys: max, sum, values[v_head_dim].
inline int64_t partial_size(const AttentionParams& p) { return p.v_head_dim + 2; }

template <class S, class A>
struct Scratch {
  int64_t query_width, value_width;
  A *query, *query_panels, *scores, *scores_t, *out, *max, *sum, *keys, *values;
  Scratch(const AttentionParams& p, Arena& arena) {
    query_width = padded<A>(p.head_dim);
    value_width = padded<A>(p.v_head_dim);
    query = arena.take<A>(kTileQueryRows * query_width);
    query_panels = arena.take<A>(kTileQueryRows * query_width);
    scores = arena.take<A>(kTileQueryRows * kBlock);
    scores_t = arena.take<A>(kBlock * kTileQueryRows);
    out = arena.take<A>(kTileQueryRows * value_width);
    max = arena.take<A>(kTileQueryRows);
    sum = arena.take<A>(kTileQueryRows);
    keys = arena.take<A>(kBlock * query_width);
    values = arena.take<A>(kBlock * value_width);
  }
};

inline bool same_rows(const Strides& a, const Strides& b) {
  return a.batch == b.batch && a.head == b.head && a.row == b.row;
}

template <class S, class A>
class DecodeRange {
 public:
  DecodeRange(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, void* scratch)
      : p_(p), b_(b), kv_head_(kv_head), arena_(scratch), w_(p, arena_) {
    make_rows(p, b, kv_head, rows, tile_);
    pack_rows<A, S>(tile_, p.query, p.query_strides, b, p.head_dim, w_.query, w_.query_width);
    if (tile_.count > kRowsAtOnce)
      pack_transposed<A>(w_.query, w_.query_width, tile_.count, p.head_dim, w_.query_panels);
  }

  void run(Range keys, A* partial) {
    keys = {larger(keys.begin, tile_.keys.begin / kBlock * kBlock), smaller(keys.end, tile_.keys.end)};
    attend<false>(keys);
    // An excluded key's NaN or Inf may have come in as 0 * NaN: once more, leaving such terms out.
    if (!all_finite(w_.out, w_.value_width, tile_.count, p_.v_head_dim)) attend<true>(keys);
    for (int64_t r = 0; r < tile_.count; ++r, partial += partial_size(p_)) {
      partial[0] = w_.max[r];
      partial[1] = w_.sum[r];
      for (int64_t d = 0; d < p_.v_head_dim; ++d) partial[2 + d] = w_.out[r * w_.value_width + d];
    }
  }

 private:
  template <bool Skip>
  void attend(Range keys) {
    start(state_, tile_.count);
    for (int64_t begin = keys.begin; begin < keys.end; begin += kBlock) {
      const int64_t count = smaller(kBlock, keys.end - begin);
      const S* k = at<S>(p_.key, p_.key_strides, b_, kv_head_, begin);
      const S* v = at<S>(p_.value, p_.value_strides, b_, kv_head_, begin);
      if (tile_.count > kRowsAtOnce)
        multiply_block<Skip>(k, v, begin, count);
      else if constexpr (Skip)
        for (int64_t r = 0; r < tile_.count; ++r) stream_block<1, Skip>(r, k, v, begin, count);
      else
        stream_all_rows(k, v, begin, count);
    }
  }

  void stream_all_rows(const S* k, const S* v, int64_t begin, int64_t count) {
    static_assert(kRowsAtOnce == 4);
    switch (tile_.count) {
      case 4:
        return stream_block<4, false>(0, k, v, begin, count);
      case 3:
        return stream_block<3, false>(0, k, v, begin, count);
      case 2:
        return stream_block<2, false>(0, k, v, begin, count);
      case 1:
        return stream_block<1, false>(0, k, v, begin, count);
    }
  }

  // As few rows as share a load: dot products with the keys, then sums of values.
  template <int Rows, bool Skip>
  void stream_block(int64_t first, const S* k, const S* v, int64_t begin, int64_t count) {
    A* s = w_.scores + first * kBlock;
    dot_products<S, A, Rows>(w_.query + first * w_.query_width, w_.query_width, k, p_.key_strides.row, count,
                             p_.head_dim, rows_ahead<S>(p_.head_dim) * p_.key_strides.row, s, kBlock);
    softmax_rows<A>(p_, b_, tile_, state_, first, Rows, begin, count);
    add_values<S, A, Rows, Skip>(s, v, p_.value_strides.row, count, p_.v_head_dim, w_.out + first * w_.value_width,
                                 w_.value_width);
  }

  // More rows: two matrix products. The first gives the scores transposed, [keys, rows], since the rows were packed
  // once and the keys, element by element, need no packing; the second takes the values as they lie.
  template <bool Skip>
  void multiply_block(const S* k, const S* v, int64_t begin, int64_t count) {
    // A latent whose values are read where they lie is fetched by halves: these columns during the second product.
    const int64_t half = latent_ && p_.v_head_dim == w_.value_width ? p_.v_head_dim / 2 / kDepth * kDepth : 0;
    Operand<A> keys{w_.keys, w_.query_width, 1};
    Panels<A> values{w_.values, w_.value_width, kPanel<A>};
    if constexpr (sizeof(S) == sizeof(A))
      keys = {reinterpret_cast<const A*>(k), p_.key_strides.row, 1, kBlock * p_.key_strides.row, half};
    else
      pack<A>(k, p_.key_strides.row, count, p_.head_dim, w_.keys, w_.query_width);
    if (sizeof(S) == sizeof(A) && p_.v_head_dim == w_.value_width)
      values = {reinterpret_cast<const A*>(v), p_.value_strides.row, kPanel<A>, kBlock * p_.value_strides.row,
                latent_ ? half : p_.v_head_dim};
    else if (sizeof(S) != sizeof(A) && latent_)
      values = {w_.keys, w_.query_width, kPanel<A>};
    else
      pack<A>(v, p_.value_strides.row, count, p_.v_head_dim, w_.values, w_.value_width);
    const int64_t width = padded<A>(tile_.count);
    gemm<A>(false, count, tile_.count, p_.head_dim, keys, {w_.query_panels, kPanel<A>, kPanel<A> * p_.head_dim},
            w_.scores_t, width, false);
    transpose(w_.scores_t, width, count, tile_.count, w_.scores, kBlock);
    softmax_rows<A>(p_, b_, tile_, state_, 0, tile_.count, begin, count);
    gemm<A>(Skip, tile_.count, w_.value_width, count, {w_.scores, kBlock, 1}, values, w_.out, w_.value_width, true);
  }

  const AttentionParams& p_;
  int64_t b_, kv_head_;
  // Values are the first columns of the keys: what is packed is packed once.
  const bool latent_ =
      p_.value == p_.key && same_rows(p_.value_strides, p_.key_strides) && p_.v_head_dim <= p_.head_dim;
  Arena arena_;
  Scratch<S, A> w_;
  const RowState<A> state_{w_.scores, w_.out, w_.max, w_.sum, kBlock, w_.value_width};
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
    using A = decltype(accumulation);
    const int64_t rows = group_size(p, kv_head) * p.q_len;
    for (int64_t r = 0; r < rows; r += kTileQueryRows)
      DecodeRange<decltype(storage), A>(p, b, kv_head, {r, smaller(r + kTileQueryRows, rows)}, scratch)
          .run(keys, static_cast<A*>(partial) + r * partial_size(p));
  });
}

void merge(const AttentionParams& p, int64_t b, int64_t kv_head, const void* partials, int64_t count) {
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    using A = decltype(accumulation);
    merge_rows<decltype(storage), A>(p, b, kv_head, static_cast<const A*>(partials), count);
  });
}

}  // namespace attnpack::ATTNPACK_ISA
