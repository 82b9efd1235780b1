#include <attnpack/ops/cpu/isa/integer_products.h>
#include <attnpack/ops/cpu/isa/weighted_sums.h>

// Decode: there are few rows, so each key and value is read from memory once. A unit of work is a range of keys. The
// partial results of the ranges are joined at the end (Flash-Decoding, Dao et al. 2023).
namespace attnpack::ATTNPACK_ISA {
namespace {

constexpr int64_t kStreamBytes = 64 << 10;  // of keys, then of values: each change slows memory
constexpr int64_t kMostStreamed = 24;       // rows that stream the keys
constexpr int64_t kPiece = 64;              // keys of a piece of a block that several heads read in turn
constexpr int kSharing = kRegisters == 32 ? 8 : kRowsAtOnce;  // of many rows, those that share each load of a key
constexpr Stream kCached{0};                                  // what other rows have just read
// Up to how many rows stream the keys. More rows are multiplied as matrices, which costs 16 bits a packing
// (PERFORMANCE.md).
template <class S, class A>
constexpr int64_t streamed_rows(int64_t v_head_dim) {
  return sizeof(S) < sizeof(A) && v_head_dim <= 256 ? kMostStreamed : 8;
}

// The most columns of quantised values whose sums are padded together: 64 bytes of two numbers each.
constexpr int64_t kMostColumns = 128;

// A row's result over a range of keys: max, sum, values[v_head_dim].
inline int64_t partial_size(const AttentionParams& p) { return p.v_head_dim + 2; }

// The fewest keys of a page that are a product of their own.
constexpr int64_t kLeastRun = 8;
// A list of values goes further than the rows that are prefetched: add_values names up to half a step more.
constexpr int64_t kListedMore = kBlock;

// The operands for keys and values that are numbers (Bits 0) or quantised rows.
template <class S, class A, int Bits>
using DecodeOperands = std::conditional_t<Bits == 0, OperandsOf<S, A>, Widened<S, A>>;

struct NoScratch {
  NoScratch(const AttentionParams&, Arena&) {}
};

template <class S, class A, int Bits = 0>
struct DecodeScratch {
  using Operands = DecodeOperands<S, A, Bits>;
  using E = typename Operands::Element;
  int64_t key_steps, query_ld, value_width, out_ld;
  A *scores, *scores_t, *out, *max, *sum;
  E *query, *query_panels, *weights, *keys, *values;
  const S **key_list, **value_list;
  std::conditional_t<Bits && kIntegerProducts, IntegerScratch, NoScratch> integers;
  // With `streamed`, only for rows that stream the keys: at most kMostStreamed.
  DecodeScratch(const AttentionParams& p, Arena& arena, bool streamed = false) : integers(p, arena) {
    constexpr int64_t kScores = larger(kTileQueryRows * kBlock, kMostStreamed * kStreamBlock);
    const int64_t rows = streamed ? kMostStreamed + kSharing : kTileQueryRows, packed = streamed ? 0 : 1;
    key_steps = steps<Operands>(p.head_dim);
    query_ld = Bits ? quantized_blocks(p.head_dim) * kQuantizedBlock : padded<E>(key_steps);
    value_width = Bits ? (p.v_head_dim + kMostColumns - 1) / kMostColumns * kMostColumns : padded<A>(p.v_head_dim);
    out_ld = value_width + (kRounds<Operands> ? kLanes<A> : 0);  // after each row: the sums of its rounded weights
    query = arena.take<E>(rows * query_ld);
    query_panels = arena.take<E>(packed * rows * query_ld);
    scores = arena.take<A>(kScores);
    scores_t = arena.take<A>(packed * kBlock * rows);
    out = arena.take<A>(rows * out_ld);
    max = arena.take<A>(kStateRows<A>);
    sum = arena.take<A>(kStateRows<A>);
    keys = arena.take<E>(packed * kBlock * query_ld);
    values = arena.take<E>(packed * steps<Operands>(kBlock) * value_width);
    if constexpr (kRounds<Operands>)
      weights = arena.take<E>(steps<Operands>(kScores));
    else
      weights = scores;
    key_list = arena.take<const S*>(list_length<S>(p, kStreamBlock + kListedMore));
    value_list = arena.take<const S*>(list_length<S>(p, kStreamBlock + kListedMore));
  }
};

inline bool same_rows(const Strides& a, const Strides& b) {
  return a.batch == b.batch && a.head == b.head && a.row == b.row;
}

// With Integers, quantised rows are multiplied as integers, else as numbers.
template <class S, class A, int Bits = 0, bool Integers = false>
class DecodeRange {
 public:
  DecodeRange(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, Range keys, void* scratch,
              bool streamed = false)
      : mask_(p, b, {keys.begin, smaller(keys.end, valid_keys(p, b))}),
        b_(b),
        kv_head_(kv_head),
        streams_(Bits || rows.end - rows.begin <= streamed_rows<S, A>(p.v_head_dim)),
        arena_(scratch),
        w_(p, arena_, streamed) {
    make_rows(p, b, kv_head, rows, mask_.keys(), tile_);
    for (int64_t r = 0; r < tile_.count; ++r) pack_query_row(r);
    // Rows that are left over are multiplied together with rows of zeros.
    if (streams_ && tile_.count > kRowsAtOnce)
      for (int64_t i = tile_.count * w_.query_ld; i < (tile_.count + kSharing - 1) * w_.query_ld; ++i)
        w_.query[i] = E(0);
    if constexpr (Integers)
      with_layout<Bits>(p.head_dim, [&](const auto& layout) {
        for (int64_t r = 0; r < tile_.count; ++r)
          layout.pack_query(w_.query + r * w_.query_ld, r, tile_.count, w_.integers);
      });
    if (!streams_) pack_transposed(StridedRows<E>{w_.query, w_.query_ld}, tile_.count, w_.key_steps, w_.query_panels);
  }

  void compute_partials(Range keys, A* partial) {
    keys = seen(keys);
    attend<false>(keys);
    finish(keys, partial);
  }

  // The parts of compute_partials, for rows that stream the keys. Heads that are read in turn call them piece by piece.
  bool streams() const { return streams_; }
  Range seen(Range keys) const {
    return {larger(keys.begin, tile_.keys.begin / kBlock * kBlock), smaller(keys.end, tile_.keys.end)};
  }
  int64_t block() const { return rows_that_fit<S>(kStreamBytes, p_.head_dim, kBlock, kStreamBlock); }
  void reset() { reset_state(state_, tile_.count); }
  // `keys` and `values` begin `done` keys after the start of the block.
  template <class Rows>
  void multiply_piece(const Rows& keys, int64_t done, int64_t count) {
    with_rows(smaller(tile_.count, kRowsAtOnce),
              [&](auto rows) { multiply<rows>(0, tile_.count - rows, keys, done, count); });
  }
  void compute_piece_weights(int64_t begin, int64_t count) {
    compute_weights(p_, b_, tile_, state_, weights_, 0, tile_.count, begin, count);
  }
  template <class Rows>
  void add_piece(const Rows& values, int64_t done, int64_t count) {
    with_rows(smaller(tile_.count, kRowsAtOnce), [&](auto rows) {
      add_values<Operands, rows, false>(w_.weights + done / Operands::kStep, values, count, p_.v_head_dim, w_.out,
                                        w_.out_ld, tile_.count - rows);
    });
  }

  void finish(Range keys, A* partial) {
    // An excluded key's NaN or Inf may have come in as 0 * NaN. Then everything is computed once more without such
    // terms.
    if (!all_finite(w_.out, w_.out_ld, tile_.count, Integers ? w_.value_width : p_.v_head_dim)) attend<true>(keys);
    for (int64_t r = 0; r < tile_.count; ++r, partial += partial_size(p_)) {
      const A* out = w_.out + r * w_.out_ld;
      // Rounding the weights changed their sum. Rescale by unrounded sum / rounded sum.
      const A rounded_sum = divisor(p_, state_, weights_, r),
              factor = rounded_sum == 0 || rounded_sum == w_.sum[r] ? A(1) : w_.sum[r] / rounded_sum;
      partial[0] = w_.max[r];
      partial[1] = w_.sum[r];
      if constexpr (Integers)
        with_layout<Bits>(p_.v_head_dim, [&](const auto& layout) { layout.read_sums(out, partial + 2); });
      else
        for (int64_t d = 0; d < p_.v_head_dim; ++d) partial[2 + d] = out[d] * factor;
    }
  }

 private:
  using Operands = DecodeOperands<S, A, Bits>;
  using E = typename Operands::Element;
  // Whether rows that stream the keys come four by four, without more after them: less code, with the same sums.
  static constexpr bool kFourByFour = std::is_same_v<A, double>;

  // With quantised keys one type stands for queries of bf16 and fp16; here the code asks which. Queries of 4 bits have
  // been rotated: they are floats, whatever their dtype was.
  void pack_query_row(int64_t r) {
    const auto pack_as = [&](auto storage) {
      const auto* row = at<decltype(storage)>(p_.query, p_.query_strides, b_, tile_.rows[r].head, tile_.rows[r].query);
      if constexpr (Bits == 0)
        Operands::pack_row(row, p_.head_dim, w_.query + r * w_.query_ld, w_.query_ld);
      else
        pack(row, p_.head_dim, w_.query + r * w_.query_ld, w_.query_ld);
    };
    if constexpr (Bits == 8 && sizeof(S) < sizeof(A))
      if (p_.dtype == DType::kFloat16) return pack_as(Float16{});
    pack_as(S{});
  }

  template <bool Skip>
  void attend(Range keys) {
    reset_state(state_, tile_.count);
    if constexpr (Bits == 0)
      attend_numbers<Skip>(keys);
    else if constexpr (Integers)
      attend_integers<Skip>(keys);
    else
      for (int64_t begin = keys.begin; begin < keys.end; begin += kStreamBlock)
        attend_block<Skip>(quantized(p_.key, p_.key_strides, begin), quantized(p_.value, p_.value_strides, begin),
                           begin, smaller(kStreamBlock, keys.end - begin));
  }

  template <bool Skip>
  void attend_numbers(Range keys) {
    const int64_t step = streams_ ? block() : kBlock;
    for (int64_t begin = keys.begin; begin < keys.end; begin += step) {
      const int64_t count = smaller(step, keys.end - begin);
      if (p_.block_table && !rows_follow(p_, begin, smaller(begin + 2 * step, p_.kv_len)))
        attend_block<Skip>(listed(p_.key, p_.key_strides, p_.head_dim, begin, count, w_.key_list),
                           listed(p_.value, p_.value_strides, p_.v_head_dim, begin, count, w_.value_list), begin,
                           count);
      else
        attend_block<Skip>(strided(p_.key, p_.key_strides, begin), strided(p_.value, p_.value_strides, begin), begin,
                           count);
    }
  }

  template <bool Skip>
  void attend_integers(Range keys) {
    static_assert(FarMemory::kStreamedKeys == kStreamBlock);
    const auto keys_at = [&](int64_t j) { return quantized(p_.key, p_.key_strides, j); };
    const auto values_at = [&](int64_t j) { return quantized(p_.value, p_.value_strides, j); };
    FarMemory memory(keys_at(keys.begin).first, kStreamBlock * p_.key_strides.row, values_at(keys.begin).first,
                     kStreamBlock * p_.value_strides.row);
    for (int64_t begin = keys.begin; begin < keys.end; begin += kStreamBlock) {
      const int64_t count = smaller(kStreamBlock, keys.end - begin);
      with_layout<Bits>(p_.head_dim, [&](const auto& layout) {
        layout.scores(keys_at(begin), count, tile_.count, w_.integers, memory, w_.scores, kStreamBlock);
      });
      compute_weights(p_, b_, tile_, state_, weights_, 0, tile_.count, begin, count);
      with_layout<Bits>(p_.v_head_dim, [&](const auto& layout) {
        layout.template add_values<Skip>(w_.weights, weights_.ld, values_at(begin), count, tile_.count, w_.integers,
                                         memory, w_.out, w_.out_ld);
      });
    }
  }

  QuantizedRows<Bits> quantized(const void* from, const Strides& strides, int64_t begin) const {
    return {at<unsigned char>(from, strides, b_, kv_head_, begin), strides.row};
  }

  // The rows of `from`, the keys or the values, from row `begin` on.
  StridedRows<S> strided(const void* from, const Strides& strides, int64_t begin) const {
    return {
        p_.block_table ? row_in_page<S>(p_, from, strides, kv_head_, begin) : at<S>(from, strides, b_, kv_head_, begin),
        strides.row};
  }

  // The rows of a block in pages, and those after them that the block prefetches.
  ListedRows<S> listed(const void* pool, const Strides& strides, int64_t width, int64_t begin, int64_t count,
                       const S** list) const {
    const int64_t ahead =
        streams_ ? prefetch_distance<kKeys<ListedRows<S>>, S>(width, Operands::kStep, ListedRows<S>::kMostAhead).rows +
                       kListedMore
                 : kBlock;
    return list_rows<S>(p_, pool, strides, kv_head_, begin, count, ahead, list);
  }

  template <bool Skip, class Rows>
  void attend_block(const Rows& k, const Rows& v, int64_t begin, int64_t count) {
    if constexpr (Bits == 0)
      if (!streams_) return multiply_block<Skip>(k, v, begin, count);
    if constexpr (Skip)
      for (int64_t r = 0; r < tile_.count; ++r) stream_block<1, Skip>(r, 0, k, v, begin, count);
    else if constexpr (kFourByFour)
      for (int64_t r = 0; r < tile_.count; r += kRowsAtOnce)
        with_rows(smaller(tile_.count - r, kRowsAtOnce),
                  [&](auto rows) { stream_block<rows, false>(r, 0, k, v, begin, count); });
    else
      with_rows(smaller(tile_.count, kRowsAtOnce),
                [&](auto rows) { stream_block<rows, false>(0, tile_.count - rows, k, v, begin, count); });
  }

  // Few rows that share each load: dot products with the keys, then weighted sums of the values. `more` rows after the
  // first `Count` rows are multiplied while L1 has the keys, or the values.
  template <int Count, bool Skip, class Rows>
  void stream_block(int64_t first, int64_t more, const Rows& k, const Rows& v, int64_t begin, int64_t count) {
    const E* const weights = w_.weights + first * weights_.ld;
    A* const out = w_.out + first * w_.out_ld;
    multiply<Count>(first, more, k, 0, count);
    compute_weights(p_, b_, tile_, state_, weights_, first, Count + more, begin, count);
    if constexpr (Bits == 0)
      add_values<Operands, Count, Skip>(weights, v, count, p_.v_head_dim, out, w_.out_ld, more);
    else
      add_values<Count, Skip>(weights, weights_.ld, v, count, p_.v_head_dim, out, w_.out_ld);
  }

  // The scores with keys that begin `done` keys after the start of the block.
  template <int Count, class Rows>
  void multiply(int64_t first, int64_t more, const Rows& k, int64_t done, int64_t count) {
    const E* const query = w_.query + first * w_.query_ld;
    A* const scores = w_.scores + first * kStreamBlock + done;
    if constexpr (Bits != 0) {
      dot_products<Count>(query, w_.query_ld, k, count, p_.head_dim, scores, kStreamBlock);
    } else {
      if constexpr (Count == kRowsAtOnce && !kFourByFour)  // fewer rows have no more after them
        if (more) return multiply_in_turn(k, scores, count);
      dot_products<Operands, Count, kKeys<Rows>>(query, w_.query_ld, k, count, p_.head_dim, scores, kStreamBlock);
    }
  }

  // The scores of all rows of the tile. The first rows bring the keys into L1.
  template <class Rows>
  void multiply_in_turn(const Rows& k, A* scores, int64_t count) {
    const int64_t step = rows_that_fit<S>(kAddedBytes, p_.head_dim, 8, kBlock);
    for (int64_t j = 0; j < count; j += step) {
      const Rows keys = k.from(j);
      const int64_t some = smaller(step, count - j);
      dot_products<Operands, kSharing, kKeys<Rows>>(w_.query, w_.query_ld, keys, some, p_.head_dim, scores + j,
                                                    kStreamBlock);
      for (int64_t r = kSharing; r < tile_.count; r += kSharing)
        dot_products<Operands, kSharing, kCached>(w_.query + r * w_.query_ld, w_.query_ld, keys, some, p_.head_dim,
                                                  scores + r * kStreamBlock + j, kStreamBlock);
    }
  }

  // More rows: two matrix products. The first gives the scores transposed, [keys, rows]: the rows were packed once, and
  // the keys are read element by element, so they need no packing. The second reads the values in place if their type
  // and width allow it.
  template <bool Skip, class Rows>
  void multiply_block(const Rows& k, const Rows& v, int64_t begin, int64_t count) {
    const bool keys_in_place = reads_keys_in_place<Rows>(),
               values_in_place = sizeof(S) == sizeof(A) && p_.v_head_dim == w_.value_width;
    // If a latent's values are read in place, the latent is prefetched in two halves. The columns before `half` are
    // prefetched during the second product, the others during the first.
    const int64_t half = latent_ && values_in_place ? p_.v_head_dim / 2 / kDepth * kDepth : 0;
    if (keys_in_place) {
      constexpr int64_t kStep = Operands::kStep;
      for (int64_t j = 0, some; j < count; j += some) {
        some = run_length(k, p_.key_strides.row, j, count);
        multiply_keys(
            {reinterpret_cast<const E*>(k[j]), p_.key_strides.row / kStep, 1, (k[j + kBlock] - k[j]) / kStep, half}, j,
            some);
      }
    } else {
      for (int64_t j = 0; j < count; ++j) {
        fetch_next(k, j, p_.head_dim);
        Operands::pack_row(k[j], p_.head_dim, w_.keys + j * w_.query_ld, w_.query_ld);
      }
      multiply_keys({w_.keys, w_.query_ld, 1}, 0, count);
    }
    transpose(w_.scores_t, padded<A>(tile_.count), count, tile_.count, w_.scores, kBlock);
    compute_weights(p_, b_, tile_, state_, weights_, 0, tile_.count, begin, count);
    const int64_t fetched_to = latent_ ? half : p_.v_head_dim;
    if constexpr (std::is_same_v<E, S>)
      if (values_in_place) {
        if constexpr (Rows::kListed)
          return multiply_values<Skip>(count, ListedPanels<E>{v, kBlock, fetched_to});
        else
          return multiply_values<Skip>(count, Panels<E>{v.first, v.stride, kPanel<A>, kBlock * v.stride, fetched_to});
      }
    if (latent_ && !keys_in_place && Operands::kStep == 1)
      return multiply_values<Skip>(count, Panels<E>{w_.keys, w_.query_ld, kPanel<A>});
    constexpr int64_t kHeight = steps<Operands>(kBlock);
    for (int64_t j = 0; j < count; ++j) fetch_next(v, j, p_.v_head_dim);
    Operands::pack_values(v, count, p_.v_head_dim, w_.values, kHeight);
    multiply_values<Skip>(count, Panels<E>{w_.values, kPanel<A>, kPanel<A> * kHeight});
  }

  // The transposed scores of the keys [first, first + count) of a block.
  void multiply_keys(const Operand<E>& keys, int64_t first, int64_t count) {
    const int64_t width = padded<A>(tile_.count);
    gemm<A, E>(false, count, tile_.count, w_.key_steps, keys, {w_.query_panels, kPanel<A>, kPanel<A> * w_.key_steps},
               w_.scores_t + first * width, width, false, score_chain(p_, b_));
  }

  template <bool Skip, class Values>
  void multiply_values(int64_t count, const Values& values) {
    gemm<A, E>(Skip, tile_.count, p_.v_head_dim, steps<Operands>(count), {w_.weights, weights_.ld, 1}, values, w_.out,
               w_.out_ld, true);
  }

  // Prefetches what the next block packs in the place of row j, where no hardware does. Always inlined, as fetch_ahead.
  template <class Rows>
  [[gnu::always_inline]] static void fetch_next(const Rows& rows, int64_t j, int64_t columns) {
    if constexpr (Rows::kListed)
      for (int64_t d = 0; d < columns; d += kLine / static_cast<int64_t>(sizeof(S))) fetch(rows[j + kBlock] + d);
  }

  // Whether the product can read the keys in place, without packing. Each run of keys is a product of its own, so short
  // pages are packed.
  template <class Rows>
  bool reads_keys_in_place() const {
    return are_elements<Operands, S>(p_.key, p_.key_strides, p_.head_dim) &&
           !(Rows::kListed && p_.page_size < kLeastRun);
  }

  const SharedMask mask_;  // in the range
  const AttentionParams& p_ = mask_.params();
  int64_t b_, kv_head_;
  const bool streams_;
  // Whether the values are the first columns of the keys. Then both are packed once.
  const bool latent_ =
      p_.value == p_.key && same_rows(p_.value_strides, p_.key_strides) && p_.v_head_dim <= p_.head_dim;
  Arena arena_;
  DecodeScratch<S, A, Bits> w_;
  const RowState<A> state_{w_.scores, w_.out, w_.max, w_.sum, streams_ ? kStreamBlock : kBlock, w_.out_ld};
  const Weights<Operands> weights_{w_.weights, state_.scores_ld / Operands::kStep, w_.value_width};
  RowTile tile_;
};

// All rows of a kv head. Quantised rows are widened once for each tile of rows that fits the registers.
template <class S, class A, int Bits, bool Integers = false>
void decode_tiles(const AttentionParams& p, int64_t b, int64_t kv_head, Range keys, void* partial, void* scratch) {
  constexpr int64_t kTile = Integers ? kIntegerRows : Bits ? kRowsAtOnce : kTileQueryRows;
  const int64_t rows = group_size(p, kv_head) * p.q_len;
  for (int64_t r = 0; r < rows; r += kTile)
    DecodeRange<S, A, Bits, Integers>(p, b, kv_head, {r, smaller(r + kTile, rows)}, keys, scratch)
        .compute_partials(keys, static_cast<A*>(partial) + r * partial_size(p));
}

template <class S, class A>
struct ScratchInTurn {
  size_t head_bytes;
  const S **list, **next;
  char* heads;
  ScratchInTurn(const AttentionParams& p, Arena& arena) {
    Arena head(nullptr);
    DecodeScratch<S, A>(p, head, true);
    head_bytes = head.used();
    list = arena.take<const S*>(kPiece);
    next = arena.take<const S*>(kPiece * kHeadsInTurn + kListedMore);
    heads = arena.take<char>(kHeadsInTurn * head_bytes);
  }
};

// Kv heads whose rows lie side by side, in packed keys or in pages. They read a piece of the keys in turn, so that
// memory is read in the order of its addresses. The bits are those of one head after the other.
template <class S, class A>
class HeadsInTurn {
 public:
  HeadsInTurn(const AttentionParams& p, int64_t b, Range kv_heads, Range keys, void* const* partials, void* scratch)
      : p_(p), b_(b), kv_heads_(kv_heads), keys_(keys), partials_(partials), arena_(scratch), w_(p, arena_) {
    add_head(kv_heads.begin);
  }

 private:
  using Head = DecodeRange<S, A>;

  // Makes the heads from kv_head on, each on the stack of its own call, and then attends.
  void add_head(int64_t kv_head) {
    if (kv_head == kv_heads_.end) return attend();
    const int64_t i = kv_head - kv_heads_.begin, rows = group_size(p_, kv_head) * p_.q_len;
    if (rows == 0) {
      heads_[i] = nullptr;
      return add_head(kv_head + 1);
    }
    Head head(p_, b_, kv_head, {0, rows}, keys_, w_.heads + i * w_.head_bytes, true);
    heads_[i] = &head;
    add_head(kv_head + 1);
  }

  template <class F>
  void for_each_head(F&& f) {
    for (int64_t i = 0; i < kv_heads_.end - kv_heads_.begin; ++i)
      if (heads_[i]) f(*heads_[i], i);
  }

  void attend() {
    Range keys = keys_;
    int64_t block = kStreamBlock;
    for_each_head([&](Head& head, int64_t) { keys = head.seen(keys_), block = head.block(), head.reset(); });
    // Values are summed in whole steps, as those of one head are.
    const int64_t summed = summed_keys<S>(p_.v_head_dim), added = kPiece / summed * summed;
    for (int64_t begin = keys.begin, count; begin < keys.end; begin += count) {
      count = smaller(block, keys.end - begin);
      for (int64_t j = 0; j < count; j += kPiece) {
        const int64_t some = smaller(kPiece, count - j);
        list_rows_of_heads(p_.key, p_.key_strides, begin + j, some);
        if (j + some < count)
          list_next(p_.key, p_.key_strides, begin + j + some, smaller(kPiece, count - j - some));
        else
          list_next(p_.value, p_.value_strides, begin, smaller(added, count));
        for_each_head([&](Head& head, int64_t i) { head.multiply_piece(rows(p_.key_strides, i, some), j, some); });
      }
      for_each_head([&](Head& head, int64_t) { head.compute_piece_weights(begin, count); });
      for (int64_t j = 0; j < count; j += added) {
        const int64_t some = smaller(added, count - j);
        list_rows_of_heads(p_.value, p_.value_strides, begin + j, some);
        if (j + some < count)
          list_next(p_.value, p_.value_strides, begin + j + some, smaller(added, count - j - some));
        else
          list_next(p_.key, p_.key_strides, begin + count, kPiece);
        for_each_head([&](Head& head, int64_t i) { head.add_piece(rows(p_.value_strides, i, some), j, some); });
      }
    }
    for_each_head([&](Head& head, int64_t i) { head.finish(keys, static_cast<A*>(partials_[i])); });
  }

  ListedRows<S> rows(const Strides& strides, int64_t head, int64_t count) const {
    return {w_.list, head * strides.head, w_.next + head * count};
  }

  // Row j of the first head. The last key stands for those after it.
  const S* row(const void* from, const Strides& strides, int64_t j) const {
    j = smaller(j, p_.kv_len - 1);
    return p_.block_table ? row_in_page<S>(p_, from, strides, kv_heads_.begin, j)
                          : at<S>(from, strides, b_, kv_heads_.begin, j);
  }

  void list_rows_of_heads(const void* from, const Strides& strides, int64_t begin, int64_t count) {
    for (int64_t j = 0; j < count; ++j) w_.list[j] = row(from, strides, begin + j);
  }

  // Lists keys [begin, begin + count) of all heads in the order of their addresses.
  void list_next(const void* from, const Strides& strides, int64_t begin, int64_t count) {
    const int64_t heads = kv_heads_.end - kv_heads_.begin;
    // A page has the rows of one head after the other, or the heads of one row after the other.
    const bool head_by_head = strides.head > strides.row;
    const S** to = w_.next;
    for (int64_t j = 0, run; j < count; j += run) {
      run = head_by_head ? smaller(p_.page_size - (begin + j) % p_.page_size, count - j) : 1;
      const S* const first = row(from, strides, begin + j);
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t r = 0; r < run; ++r) *to++ = first + h * strides.head + r * strides.row;
    }
    while (to < w_.next + kPiece * heads + kListedMore) *to = to[-1], ++to;
  }

  const AttentionParams& p_;
  int64_t b_;
  Range kv_heads_, keys_;
  void* const* partials_;
  Arena arena_;
  const ScratchInTurn<S, A> w_;
  Head* heads_[kHeadsInTurn];
};

template <class S, class A>
bool reads_in_turn(const AttentionParams& p, Range kv_heads) {
  bool streamed = kv_heads.end - kv_heads.begin > 1;
  for (int64_t h = kv_heads.begin; h < kv_heads.end; ++h)
    streamed &= group_size(p, h) * p.q_len <= streamed_rows<S, A>(p.v_head_dim);
  return streamed;
}

template <class S, class A>
void decode_head(const AttentionParams& p, int64_t b, int64_t kv_head, Range keys, void* partial, void* scratch) {
  if constexpr (std::is_same_v<A, float>) {
    // Integers round the query to 16 bits.
    constexpr bool kIntegers = kIntegerProducts && !std::is_same_v<S, float>;
    // Queries of 16 bits share one type, whose weights need be no more exact than they are.
    using Query = std::conditional_t<std::is_same_v<S, float>, float, BFloat16>;
    if (p.quantized_bits == 8) return decode_tiles<Query, A, 8, kIntegers>(p, b, kv_head, keys, partial, scratch);
    if (p.quantized_bits == 4) return decode_tiles<float, A, 4, kIntegers>(p, b, kv_head, keys, partial, scratch);
  }
  if constexpr (kCompiled<S>) decode_tiles<S, A, 0>(p, b, kv_head, keys, partial, scratch);
}

template <class S, class A>
using PlainScratch = DecodeScratch<S, A, 0>;
template <class S, class A>
using QuantizedScratch = DecodeScratch<S, A, 8>;  // as large as with 4 bits

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

size_t decode_scratch(const AttentionParams& p) {
  if (p.quantized_bits) return scratch_bytes<QuantizedScratch>(p);
  const size_t one = scratch_bytes<PlainScratch>(p);
  return heads_in_turn(p) > 1 ? larger(one, scratch_bytes<ScratchInTurn>(p)) : one;
}

void decode(const AttentionParams& p, int64_t b, Range kv_heads, Range keys, void* const* partials, void* scratch) {
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    using S = decltype(storage);
    using A = decltype(accumulation);
    // Heads of fp64 are read one after the other: that is less code.
    if constexpr (kCompiled<S> && !std::is_same_v<S, double>)
      if (reads_in_turn<S, A>(p, kv_heads)) {
        HeadsInTurn<S, A>(p, b, kv_heads, keys, partials, scratch);
        return;
      }
    for (int64_t i = 0; i < kv_heads.end - kv_heads.begin; ++i)
      decode_head<S, A>(p, b, kv_heads.begin + i, keys, partials[i], scratch);
  });
}

void merge(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, const void* partials, int64_t count) {
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    using A = decltype(accumulation);
    if constexpr (std::is_same_v<A, float>)
      if (p.quantized_bits == 4) return merge_rows<float>(p, b, kv_head, rows, static_cast<const A*>(partials), count);
    merge_rows<decltype(storage), A>(p, b, kv_head, rows, static_cast<const A*>(partials), count);
  });
}

}  // namespace attnpack::ATTNPACK_ISA
