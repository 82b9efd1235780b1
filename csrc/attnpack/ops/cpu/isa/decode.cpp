#include <attnpack/ops/cpu/isa/dot.h>

// Decode: there are few rows, so each key and value is read from memory once. A unit of work is a range of keys. The
// partial results of the ranges are joined at the end (Flash-Decoding, Dao et al. 2023).
namespace attnpack::ATTNPACK_ISA {
namespace {

// The number of keys between two updates of the softmax: kBlock in multiply_block, at most kStreamBlock in
// stream_block.
constexpr int64_t kBlock = 64, kStreamBlock = 256;
constexpr int64_t kStreamBytes = 64 << 10;  // of keys, then of values: each change slows memory
constexpr int64_t kAddedBytes = 8 << 10;    // of values that are summed at a time: they stay in L1
constexpr Stream kKeys{8 << 10};            // into L1, even if keys are also the values: PERFORMANCE.md
// With 16 registers, four rows read the values in columns of two vectors. These are prefetched into L2, because
// prefetching them into L1 is slower (PERFORMANCE.md).
template <int Rows>
constexpr Stream kValues{8 << 10, Rows == 4 && kRegisters == 16};

// How many rows of `width` numbers fit into `bytes`: a multiple of `least`, at most `most`.
template <class S>
int64_t rows_that_fit(int64_t bytes, int64_t width, int64_t least, int64_t most) {
  const int64_t fit = bytes / (larger(width, 1) * static_cast<int64_t>(sizeof(S))) / least * least;
  return fit < least ? least : smaller(fit, most);
}

// out[r, d ...] += sum over j of p[r, j] * v[j, d ...], for `Vectors` whole vectors of columns, or for the first `some`
// columns of one vector. All arithmetic is in vectors, so that every element sees the same operations. A row of p has
// kStreamBlock numbers. Along with the sums it prefetches the numbers `ahead` elements further on, in the order of
// their addresses: one number for each `Parts` numbers that it reads.
template <class Operands, int Rows, bool Skip, int Parts, int Vectors, class S, class A>
inline void add_columns(const typename Operands::Element* p, const S* v, int64_t stride, int64_t count, int64_t d,
                        int64_t ahead, A* out, int64_t ldo, int64_t some = kLanes<A>) {
  using E = typename Operands::Element;
  constexpr int kTogether = Vectors % Operands::kTogether == 0 ? Operands::kTogether : 1;
  // kRead: numbers read at once. kRow: numbers of a row. kFetched: numbers read per cache line that is prefetched.
  constexpr int kStep = static_cast<int>(Operands::kStep), kRead = kStep * kTogether * kLanes<A>;
  constexpr int kRow = Vectors * kLanes<A>, kFetched = Parts * kLine / static_cast<int>(sizeof(S));
  constexpr int64_t ldp = kStreamBlock / Operands::kStep;
  Vec<A> sum[Rows][Vectors];
  clear(sum);
  const auto add = [&](int64_t j, const S* value, const S* next) __attribute__((always_inline)) {
    const S* far = v + j / Parts * stride + d + ahead + (kStep < Parts && j % 2 ? kRow / 2 : 0);
    E x[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) x[r] = p[r * ldp + j / Operands::kStep];
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; c += kTogether) {
      const int64_t column = c * kLanes<A>;
      Vec<E> element[kTogether];
      if (some < kLanes<A>)
        element[0] = Operands::below_some(value, next, some);
      else
        Operands::template below<kTogether>(value + column, next ? next + column : nullptr, element);
      const int read = c * kStep * kLanes<A>;  // numbers read before this step
#pragma GCC unroll 2
      for (int n = (read + kFetched - 1) / kFetched * kFetched; n < read + kRead; n += kFetched)
        fetch_ahead<kValues<Rows>>(far + n / Parts / kRow * stride + n / Parts % kRow);
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
  for (; j + kStep <= count; j += kStep) add(j, v + j * stride + d, v + (j + 1) * stride + d);
  if (j < count) add(j, v + j * stride + d, nullptr);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Vectors; ++c) {
      A* to = out + r * ldo + d + c * kLanes<A>;
      if (some == kLanes<A>) store<A>(to, load<A>(to) + sum[r][c]);
      for (int64_t i = 0; some < kLanes<A> && i < some; ++i) to[i] += sum[r][c][i];
    }
}

// How many vectors of columns have their sums in registers.
template <int Rows>
constexpr int kColumns = kRegisters == 32 ? (Rows < 4 ? 8 : 4)
                         : Rows == 1      ? 8
                         : Rows < 4       ? 4
                                          : 2;

template <class Operands, int Rows, bool Skip, int Parts, class S, class A>
inline void add_rows(const typename Operands::Element* p, const S* v, int64_t stride, int64_t count, int64_t dim,
                     int64_t ahead, A* out, int64_t ldo) {
  constexpr int kMost = kColumns<Rows>, kLess = kMost < 4 ? kMost : 4;
  int64_t d = 0;
  for (; d + kMost * kLanes<A> <= dim; d += kMost * kLanes<A>)
    add_columns<Operands, Rows, Skip, Parts, kMost>(p, v, stride, count, d, ahead, out, ldo);
  for (; d + kLess * kLanes<A> <= dim; d += kLess * kLanes<A>)
    add_columns<Operands, Rows, Skip, Parts, kLess>(p, v, stride, count, d, ahead, out, ldo);
  for (; d < dim; d += kLanes<A>)
    add_columns<Operands, Rows, Skip, Parts, 1>(p, v, stride, count, d, ahead, out, ldo, smaller(kLanes<A>, dim - d));
}

// Sums the values of a few keys, then adds that sum to out: short sums round less than one long sum.
template <class Operands, int Rows, bool Skip, class S, class A>
inline void add_values(const typename Operands::Element* p, const S* v, int64_t stride, int64_t count, int64_t dim,
                       A* out, int64_t ldo) {
  const int64_t step = rows_that_fit<S>(kAddedBytes, dim, 8, kBlock);
  const int64_t far = prefetch_distance<kValues<Rows>, S>(dim, stride, Operands::kStep);
  for (int64_t j = 0; j < count; j += step, p += step / Operands::kStep, v += step * stride) {
    const int64_t some = smaller(step, count - j);
    // With 16 registers no row is read whole anyway, and widening each row twice would cost more.
    if (Rows < 4 || kRegisters == 16 || dim <= kColumns<Rows> * kLanes<A>) {
      add_rows<Operands, Rows, Skip, 1>(p, v, stride, some, dim, far, out, ldo);
    } else {
      // Memory is fastest where rows are read whole. So the first two rows of p read the values from memory, and then
      // the other two read them from the L1 cache.
      constexpr int kHalf = Rows < 4 ? Rows : 2;
      add_rows<Operands, kHalf, Skip, 2>(p, v, stride, some, dim, far, out, ldo);
      add_rows<Operands, kHalf, Skip, 2>(p + kHalf * (kStreamBlock / Operands::kStep), v, stride, some, dim,
                                         far + some / 2 * stride, out + kHalf * ldo, ldo);
    }
  }
}

// A row's result over a range of keys: max, sum, values[v_head_dim].
inline int64_t partial_size(const AttentionParams& p) { return p.v_head_dim + 2; }

template <class S, class A>
struct DecodeScratch {
  using Operands = OperandsOf<S, A>;
  using E = typename Operands::Element;
  int64_t key_steps, query_ld, value_width, out_ld;
  A *scores, *scores_t, *out, *max, *sum;
  E *query, *query_panels, *weights, *keys, *values;
  DecodeScratch(const AttentionParams& p, Arena& arena) {
    constexpr int64_t kScores = larger(kTileQueryRows * kBlock, kRowsAtOnce * kStreamBlock);
    key_steps = steps<Operands>(p.head_dim);
    query_ld = padded<E>(key_steps);
    value_width = padded<A>(p.v_head_dim);
    out_ld = value_width + (kRounds<Operands> ? kLanes<A> : 0);  // after each row: the sums of its rounded weights
    query = arena.take<E>(kTileQueryRows * query_ld);
    query_panels = arena.take<E>(kTileQueryRows * query_ld);
    scores = arena.take<A>(kScores);
    scores_t = arena.take<A>(kBlock * kTileQueryRows);
    out = arena.take<A>(kTileQueryRows * out_ld);
    max = arena.take<A>(kTileQueryRows);
    sum = arena.take<A>(kTileQueryRows);
    keys = arena.take<E>(kBlock * query_ld);
    values = arena.take<E>(steps<Operands>(kBlock) * value_width);
    if constexpr (kRounds<Operands>)
      weights = arena.take<E>(steps<Operands>(kScores));
    else
      weights = scores;
  }
};

inline bool same_rows(const Strides& a, const Strides& b) {
  return a.batch == b.batch && a.head == b.head && a.row == b.row;
}

template <class S, class A>
class DecodeRange {
 public:
  DecodeRange(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, Range keys, void* scratch)
      : mask_(p, b, {keys.begin, smaller(keys.end, valid_keys(p, b))}),
        b_(b),
        kv_head_(kv_head),
        streams_(rows.end - rows.begin <= kRowsAtOnce),
        arena_(scratch),
        w_(p, arena_) {
    make_rows(p, b, kv_head, rows, mask_.keys(), tile_);
    for (int64_t r = 0; r < tile_.count; ++r)
      Operands::pack_row(at<S>(p.query, p.query_strides, b, tile_.rows[r].head, tile_.rows[r].query), p.head_dim,
                         w_.query + r * w_.query_ld, w_.query_ld);
    if (!streams_) pack_transposed<E>(w_.query, w_.query_ld, tile_.count, w_.key_steps, w_.query_panels);
  }

  void compute_partials(Range keys, A* partial) {
    keys = {larger(keys.begin, tile_.keys.begin / kBlock * kBlock), smaller(keys.end, tile_.keys.end)};
    attend<false>(keys);
    // An excluded key's NaN or Inf may have come in as 0 * NaN. Then everything is computed once more without such
    // terms.
    if (!all_finite(w_.out, w_.out_ld, tile_.count, p_.v_head_dim)) attend<true>(keys);
    for (int64_t r = 0; r < tile_.count; ++r, partial += partial_size(p_)) {
      const A* out = w_.out + r * w_.out_ld;
      // Rounding the weights changed their sum. Rescale by unrounded sum / rounded sum.
      const A rounded_sum = divisor(p_, state_, weights_, r),
              factor = rounded_sum == 0 || rounded_sum == w_.sum[r] ? A(1) : w_.sum[r] / rounded_sum;
      partial[0] = w_.max[r];
      partial[1] = w_.sum[r];
      for (int64_t d = 0; d < p_.v_head_dim; ++d) partial[2 + d] = out[d] * factor;
    }
  }

 private:
  using Operands = OperandsOf<S, A>;
  using E = typename Operands::Element;

  template <bool Skip>
  void attend(Range keys) {
    reset_state(state_, tile_.count);
    const int64_t block = streams_ ? rows_that_fit<S>(kStreamBytes, p_.head_dim, kBlock, kStreamBlock) : kBlock;
    for (int64_t begin = keys.begin; begin < keys.end; begin += block) {
      const int64_t count = smaller(block, keys.end - begin);
      const S* k = at<S>(p_.key, p_.key_strides, b_, kv_head_, begin);
      const S* v = at<S>(p_.value, p_.value_strides, b_, kv_head_, begin);
      if (!streams_)
        multiply_block<Skip>(k, v, begin, count);
      else if constexpr (Skip)
        for (int64_t r = 0; r < tile_.count; ++r) stream_block<1, Skip>(r, k, v, begin, count);
      else
        with_rows(tile_.count, [&](auto rows) { stream_block<rows, false>(0, k, v, begin, count); });
    }
  }

  // Few rows that share each load: dot products with the keys, then weighted sums of the values.
  template <int Rows, bool Skip>
  void stream_block(int64_t first, const S* k, const S* v, int64_t begin, int64_t count) {
    dot_products<Operands, Rows, kKeys>(w_.query + first * w_.query_ld, w_.query_ld, k, p_.key_strides.row, count,
                                        p_.head_dim, w_.scores + first * kStreamBlock, kStreamBlock);
    compute_weights(p_, b_, tile_, state_, weights_, first, Rows, begin, count);
    add_values<Operands, Rows, Skip>(w_.weights + first * weights_.ld, v, p_.value_strides.row, count, p_.v_head_dim,
                                     w_.out + first * w_.out_ld, w_.out_ld);
  }

  // More rows: two matrix products. The first gives the scores transposed, [keys, rows]: the rows were packed once, and
  // the keys are read element by element, so they need no packing. The second reads the values in place if their type
  // and width allow it.
  template <bool Skip>
  void multiply_block(const S* k, const S* v, int64_t begin, int64_t count) {
    constexpr int64_t kHeight = steps<Operands>(kBlock), kStep = Operands::kStep;
    const bool keys_in_place = this->keys_in_place(),
               values_in_place = sizeof(S) == sizeof(A) && p_.v_head_dim == w_.value_width;
    // If a latent's values are read in place, the latent is prefetched in two halves. The columns before `half` are
    // prefetched during the second product, the others during the first.
    const int64_t half = latent_ && values_in_place ? p_.v_head_dim / 2 / kDepth * kDepth : 0;
    Operand<E> keys{w_.keys, w_.query_ld, 1};
    Panels<E> values{w_.values, kPanel<A>, kPanel<A> * kHeight};
    if (keys_in_place)
      keys = {reinterpret_cast<const E*>(k), p_.key_strides.row / kStep, 1, kBlock * p_.key_strides.row / kStep, half};
    else
      for (int64_t j = 0; j < count; ++j)
        Operands::pack_row(k + j * p_.key_strides.row, p_.head_dim, w_.keys + j * w_.query_ld, w_.query_ld);
    if (values_in_place)
      values = {reinterpret_cast<const E*>(v), p_.value_strides.row, kPanel<A>, kBlock * p_.value_strides.row,
                latent_ ? half : p_.v_head_dim};
    else if (latent_ && !keys_in_place && kStep == 1)
      values = {w_.keys, w_.query_ld, kPanel<A>};
    else
      Operands::pack_values(v, p_.value_strides.row, count, p_.v_head_dim, w_.values, kHeight);
    const int64_t width = padded<A>(tile_.count);
    gemm<A, E>(false, count, tile_.count, w_.key_steps, keys, {w_.query_panels, kPanel<A>, kPanel<A> * w_.key_steps},
               w_.scores_t, width, false, score_chain(p_, b_));
    transpose(w_.scores_t, width, count, tile_.count, w_.scores, kBlock);
    compute_weights(p_, b_, tile_, state_, weights_, 0, tile_.count, begin, count);
    gemm<A, E>(Skip, tile_.count, w_.value_width, steps<Operands>(count), {w_.weights, weights_.ld, 1}, values, w_.out,
               w_.out_ld, true);
  }

  // Whether the product can read the keys in place, without packing.
  bool keys_in_place() const {
    const auto whole = [](int64_t n) { return n % Operands::kStep == 0; };
    const Strides& s = p_.key_strides;
    return sizeof(S) * Operands::kStep == sizeof(E) && reinterpret_cast<uintptr_t>(p_.key) % sizeof(E) == 0 &&
           whole(p_.head_dim) && whole(s.batch) && whole(s.head) && whole(s.row);
  }

  const SharedMask mask_;  // in the range
  const AttentionParams& p_ = mask_.params();
  int64_t b_, kv_head_;
  const bool streams_;
  // Whether the values are the first columns of the keys. Then both are packed once.
  const bool latent_ =
      p_.value == p_.key && same_rows(p_.value_strides, p_.key_strides) && p_.v_head_dim <= p_.head_dim;
  Arena arena_;
  DecodeScratch<S, A> w_;
  const RowState<A> state_{w_.scores, w_.out, w_.max, w_.sum, streams_ ? kStreamBlock : kBlock, w_.out_ld};
  const Weights<Operands> weights_{w_.weights, state_.scores_ld / Operands::kStep, w_.value_width};
  RowTile tile_;
};

template <class S, class A>
void merge_rows(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, const A* partials, int64_t count) {
  const int64_t group = group_size(p, kv_head), size = partial_size(p), step = group * p.q_len * size;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const A* parts = partials + r * size;
    A top = A(-kInfinity), sum = 0;
    for (int64_t i = 0; i < count; ++i) top = parts[i * step] > top ? parts[i * step] : top;
    // The first part is overwritten with the sum: the caller's buffer is scratch.
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

size_t decode_scratch(const AttentionParams& p) { return scratch_bytes<DecodeScratch>(p); }

void decode(const AttentionParams& p, int64_t b, int64_t kv_head, Range keys, void* partial, void* scratch) {
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    using S = decltype(storage);
    using A = decltype(accumulation);
    const int64_t rows = group_size(p, kv_head) * p.q_len;
    for (int64_t r = 0; r < rows; r += kTileQueryRows)
      DecodeRange<S, A>(p, b, kv_head, {r, smaller(r + kTileQueryRows, rows)}, keys, scratch)
          .compute_partials(keys, static_cast<A*>(partial) + r * partial_size(p));
  });
}

void merge(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, const void* partials, int64_t count) {
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    using A = decltype(accumulation);
    merge_rows<decltype(storage), A>(p, b, kv_head, rows, static_cast<const A*>(partials), count);
  });
}

}  // namespace attnpack::ATTNPACK_ISA
