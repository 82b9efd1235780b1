#include <attnpack/ops/cpu/isa/operands.h>

// Prefill: the rows of a kv head in tiles, the keys in blocks, both products by gemm. Nothing of size q_len x kv_len is
// stored. Long keys are packed block by block for several tiles, which take each block in turn.
namespace attnpack::ATTNPACK_ISA {
namespace {

// How many keys a block has. Its scores, packed keys and packed values stay in the L2 cache.
int64_t block_keys(const AttentionParams& p) {
  const int64_t width = p.head_dim + p.v_head_dim;
  static_assert(kKeyAlignment % 256 == 0);
  return width <= 256 ? 256 : width <= 512 ? 128 : 64;
}

// A tile of rows on its way through the keys.
template <class E, class A>
struct PrefillTile {
  RowTile rows;
  Operand<E> query;
  RowState<A> state;
};

template <class S, class A>
struct PrefillScratch {
  using Operands = OperandsOf<S, A>;
  using E = typename Operands::Element;
  int64_t block, key_steps, block_steps, value_width, out_ld;
  PackedBlocks blocks;
  A *scores, *out, *max, *sum;  // out, max, sum and query are those of all tiles, one tile after the other
  E *query, *keys, *values, *weights;
  const S** list;

  PrefillScratch(const AttentionParams& p, Arena& arena) : block(block_keys(p)), blocks(p.kv_len, block, arena) {
    const int64_t tiles = most_tiles_together(p);
    key_steps = steps<Operands>(p.head_dim);
    block_steps = steps<Operands>(block);
    value_width = padded<A>(p.v_head_dim);
    out_ld = value_width + (kRounds<Operands> ? kLanes<A> : 0);  // after each row: the sums of its rounded weights
    const int64_t rows = larger(tiles * kTileQueryRows, kWholeHeadRows);
    query = arena.take<E>(rows * key_steps);
    scores = arena.take<A>(kWholeHeadRows * block);
    out = arena.take<A>(rows * out_ld);
    max = arena.take<A>(tiles * kStateRows<A>);
    sum = arena.take<A>(tiles * kStateRows<A>);
    keys = arena.take<E>(blocks.slots() * block * key_steps);
    values = arena.take<E>(blocks.slots() * block_steps * value_width);
    if constexpr (kRounds<Operands>)
      weights = arena.take<E>(kWholeHeadRows * block_steps);
    else
      weights = scores;
    list = arena.take<const S*>(list_length<S>(p, block));
  }

  E* query_of(int64_t tile) const { return query + tile * kTileQueryRows * key_steps; }
  RowState<A> state_of(int64_t tile) const {
    return {scores, out + tile * kTileQueryRows * out_ld, max + tile * kStateRows<A>, sum + tile * kStateRows<A>, block,
            out_ld};
  }
};

// The rows of the head that the thread takes next, if heads are short. They are prefetched a few lines at a time, in
// shares between other work.
template <class S>
class NextHead {
 public:
  NextHead() = default;
  NextHead(const AttentionParams& p, int64_t b, int64_t kv_head) {
    if (++kv_head == p.num_kv_heads) kv_head = 0, ++b;
    if (b == p.batch || p.block_table || p.kv_len > kMostRows || p.q_len > kMostRows) return;
    const int64_t keys = valid_keys(p, b);
    add(at<S>(p.key, p.key_strides, b, kv_head, 0), p.key_strides.row, keys, p.head_dim);
    add(at<S>(p.value, p.value_strides, b, kv_head, 0), p.value_strides.row, keys, p.v_head_dim);
    if (group_size(p, kv_head) > 0)
      add(at<S>(p.query, p.query_strides, b, group_head(p, kv_head, 0), 0), p.query_strides.row, p.q_len, p.head_dim);
  }

  void spread_over(int64_t times) { share_ = times > 0 ? (lines_ + times - 1) / times : 0; }
  void fetch_share() {
    for (int64_t left = share_; left > 0 && part_ < parts_;) {
      const Part& part = list_[part_];
      const S* const row = part.first + row_ * part.stride;
      const int64_t end = smaller(part.width, column_ + left * kOfLine);
      for (; column_ < end; column_ += kOfLine, --left) fetch(row + column_);
      if (column_ < part.width) return;
      column_ = 0;
      if (++row_ == part.rows) row_ = 0, ++part_;
    }
  }

 private:
  static constexpr int64_t kMostRows = 512, kOfLine = kLine / sizeof(S);
  struct Part {
    const S* first;
    int64_t stride, rows, width;
  };
  void add(const S* first, int64_t stride, int64_t rows, int64_t width) {
    if (rows <= 0 || width <= 0) return;
    if (stride == width) width *= rows, rows = 1;
    list_[parts_++] = {first, stride, rows, width};
    lines_ += rows * ((width + kOfLine - 1) / kOfLine);
  }

  Part list_[3];
  int64_t parts_ = 0, lines_ = 0, share_ = 0, part_ = 0, row_ = 0, column_ = 0;
};

template <class S, class A>
class PrefillTiles {
 public:
  PrefillTiles(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, void* scratch)
      : mask_(p, b, {0, valid_keys(p, b)}), b_(b), kv_head_(kv_head), arena_(scratch), w_(p, arena_) {
    w_.blocks.begin_tile(b * p.num_kv_heads + kv_head);
    const int64_t step = rows.end - rows.begin <= kWholeHeadRows ? kWholeHeadRows : kTileQueryRows;
    for (int64_t r = rows.begin; r < rows.end; r += step, ++count_) load_rows({r, smaller(r + step, rows.end)}, count_);
    if (rows.begin == 0) {
      next_ = NextHead<S>(p, b, kv_head);
      next_.spread_over(register_tiles(tiles_[0].rows));
    }
  }

  void compute_outputs() {
    attend_keys(tiles_, tiles_ + count_, false);
    for (Tile* t = tiles_; t < tiles_ + count_; ++t) {
      // An excluded key's NaN or Inf may have come in as 0 * NaN. Then everything is computed once more without such
      // terms.
      if (!all_finite(t->state.out, w_.out_ld, t->rows.count, p_.v_head_dim)) attend_keys(t, t + 1, true);
      for (int64_t r = 0; r < t->rows.count; r += kSoftmaxRows<A>)
        finish_rows(*t, r, smaller(kSoftmaxRows<A>, t->rows.count - r));
    }
  }

 private:
  using Operands = OperandsOf<S, A>;
  using E = typename Operands::Element;
  using Tile = PrefillTile<E, A>;

  void load_rows(Range rows, int64_t number) {
    Tile& tile = tiles_[number];
    tile.state = w_.state_of(number);
    make_rows(p_, b_, kv_head_, rows, mask_.keys(), tile.rows);
    const auto row = [&](int64_t r) {
      return at<S>(p_.query, p_.query_strides, b_, tile.rows.rows[r].head, tile.rows.rows[r].query);
    };
    // Longer heads are packed, which reads row after row: nothing has prefetched them.
    if (p_.q_len <= kWholeHeadRows && group_size(p_, kv_head_) == 1 &&
        are_elements<Operands, S>(p_.query, p_.query_strides, p_.head_dim)) {
      tile.query = {reinterpret_cast<const E*>(row(0)), p_.query_strides.row / Operands::kStep, 1};
      return;
    }
    E* const packed = w_.query_of(number);
    tile.query = {packed, w_.key_steps, 1};
    for (int64_t r = 0; r < tile.rows.count; ++r)
      Operands::pack_row(row(r), p_.head_dim, packed + r * w_.key_steps, w_.key_steps);
  }

  // Takes the tiles [first, last) through the blocks of keys that they see.
  void attend_keys(Tile* first, Tile* last, bool skip_excluded) {
    Range keys{p_.kv_len, 0};
    for (Tile* t = first; t < last; ++t) {
      // The products with the first block of values are the first numbers in `out`.
      reset_state(t->state, t->rows.count, t->rows.keys.empty() ? 0 : whole_vectors<A>(p_.v_head_dim));
      if (t->rows.keys.empty()) continue;
      keys = {smaller(keys.begin, first_block(*t)), larger(keys.end, t->rows.keys.end)};
    }
    for (int64_t begin = keys.begin; begin < keys.end; begin += w_.block) {
      const int64_t slot = w_.blocks.slot(begin, [&](int64_t slot) { pack_block(begin, slot); });
      for (Tile* t = first; t < last; ++t)
        if (begin >= first_block(*t) && begin < t->rows.keys.end)
          for_each_part<A>(t->rows, begin, w_.block, [&](Range rows, Range keys) {
            attend_block(*t, rows, slot, begin, keys, skip_excluded, begin > first_block(*t));
          });
    }
  }

  void finish_rows(const Tile& tile, int64_t first, int64_t count) {
    A divisors_of_rows[kSoftmaxRows<A>], logs[kSoftmaxRows<A>];
    divisors(p_, tile.state, weights_, first, count, divisors_of_rows);
    if constexpr (kLogsTogether<A>) log_each(tile.state.sum + first, count, logs);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = first + i;
      const A sum = tile.state.sum[r];
      finish_row<A, S>(p_, b_, tile.rows.rows[r].head, tile.rows.rows[r].query, tile.state.max[r], sum,
                       tile.state.out + r * w_.out_ld, divisors_of_rows[i], kLogsTogether<A> ? logs[i] : log_one(sum));
    }
  }

  int64_t first_block(const Tile& tile) const { return tile.rows.keys.begin / w_.block * w_.block; }

  // some: of the block, which begins at key `begin`.
  void attend_block(Tile& tile, Range rows, int64_t slot, int64_t begin, Range some, bool skip_excluded,
                    bool accumulate) {
    const Panels<E> keys{w_.keys + slot * w_.block * w_.key_steps, kPanel<A>, kPanel<A> * w_.key_steps};
    Panels<E> values{w_.values + slot * w_.block_steps * w_.value_width, kPanel<A>, kPanel<A> * w_.block_steps};
    if constexpr (std::is_same_v<E, S>)
      if (values_in_place_)
        values = {at<S>(p_.value, p_.value_strides, b_, kv_head_, begin), p_.value_strides.row, kPanel<A>};
    const int64_t row_count = rows.end - rows.begin, count = some.end - some.begin;
    const auto fetch_next = [&] { next_.fetch_share(); };
    gemm<A, E>(false, row_count, count, w_.key_steps,
               {tile.query.data + rows.begin * tile.query.row, tile.query.row, 1}, keys.part(0, some.begin),
               w_.scores + rows.begin * w_.block, w_.block, false, score_chain(p_, b_), fetch_next);
    compute_weights(p_, b_, tile.rows, tile.state, weights_, rows.begin, row_count, begin + some.begin, count);
    gemm<A, E>(skip_excluded, row_count, p_.v_head_dim, steps<Operands>(count),
               {w_.weights + rows.begin * w_.block_steps, w_.block_steps, 1},
               values.part(some.begin / Operands::kStep, 0), tile.state.out + rows.begin * w_.out_ld, w_.out_ld,
               accumulate, kDepth, fetch_next);
  }

  // A lower bound on the products in this tile.
  int64_t register_tiles(const RowTile& tile) const {
    const auto parts = [](int64_t columns, int64_t depth) {
      return padded<A>(columns) / kPanel<A> * ((depth + kDepth - 1) / kDepth);
    };
    const int64_t keys = tile.keys.end - tile.keys.begin;
    return (tile.count + kTileRows - 1) / kTileRows *
           (parts(keys, w_.key_steps) + parts(p_.v_head_dim, steps<Operands>(keys)));
  }

  void pack_block(int64_t begin, int64_t slot) {
    const int64_t count = smaller(w_.block, valid_keys(p_, b_) - begin);
    with_keys(p_.key, p_.key_strides, begin, count, [&](const auto& keys) {
      Operands::pack_keys(keys, count, p_.head_dim, w_.keys + slot * w_.block * w_.key_steps);
    });
    if (values_in_place_) return;
    with_keys(p_.value, p_.value_strides, begin, count, [&](const auto& values) {
      Operands::pack_values(values, count, p_.v_head_dim, w_.values + slot * w_.block_steps * w_.value_width,
                            w_.block_steps);
    });
  }

  // Calls f with the rows of keys [begin, begin + count) in `from`, the keys or the values.
  template <class F>
  void with_keys(const void* from, const Strides& strides, int64_t begin, int64_t count, F&& f) const {
    if (p_.block_table)
      f(list_rows<S>(p_, from, strides, kv_head_, begin, count, 0, w_.list));
    else
      f(StridedRows<S>{at<S>(from, strides, b_, kv_head_, begin), strides.row});
  }

  const SharedMask mask_;
  const AttentionParams& p_ = mask_.params();
  int64_t b_, kv_head_;
  Arena arena_;
  PrefillScratch<S, A> w_;
  const Weights<Operands> weights_{w_.weights, w_.block_steps, w_.value_width};
  // Whether the product reads the values where they are. More of them would take the place of others in the L1 cache.
  const bool values_in_place_ =
      std::is_same_v<E, S> && p_.kv_len <= kFewKeys && !p_.block_table && p_.v_head_dim == w_.value_width;
  Tile tiles_[kTilesTogether];
  int64_t count_ = 0;
  NextHead<S> next_;
};

}  // namespace

size_t prefill_scratch(const AttentionParams& p) { return scratch_bytes<PrefillScratch>(p); }

void prefill(const AttentionParams& p, int64_t b, int64_t kv_head, Range rows, void* scratch) {
  dispatch_pairs(p.dtype, [&](auto storage, auto accumulation) {
    using S = decltype(storage);
    using A = decltype(accumulation);
    PrefillTiles<S, A>(p, b, kv_head, rows, scratch).compute_outputs();
  });
}

}  // namespace attnpack::ATTNPACK_ISA
