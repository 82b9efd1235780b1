#include <sched.h>

#include <attnpack/ops/cpu/isa/operands.h>

// Backward (Dao et al. 2022, algorithm 4): the probabilities P are recomputed from lse, tile by tile.
//   D = rowsum(dO * O) - dlse,  dS = P * (dO V^T - D),
//   dV = P^T dO,  dQ = scale dS K,  dK = scale dS^T Q.
// A unit of work is one block of keys. It visits the tiles of rows one after the other. The blocks add to a tile's dQ
// one at a time, in the order of the blocks, so each sum has one fixed order on any number of threads.
// Where bf16 is multiplied in pairs, P and dS are rounded to bf16 for the last three products (as in FlashAttention-2).
namespace attnpack::ATTNPACK_ISA {
namespace {

template <class S, class A>
struct BackwardScratch {
  using Operands = OperandsOf<S, A>;
  using E = typename Operands::Element;
  int64_t key_width, value_width;  // row widths of the sums, in whole panels
  int64_t key_steps, value_steps;  // elements of a row
  int64_t key_ld, value_ld;        // row strides; no powers of two: such rows would share few lines of the L1 cache
  int64_t block, tile_steps, block_steps;
  E *query, *grad_out;                 // the tile's rows, [rows, ld]
  E *keys_t, *values_t;                // the block's keys and values, transposed in panels
  Panels<E> keys, queries, grad_outs;  // the block's keys and the tile's rows, below each other
  // With pairs: those panels, P and dS with pairs along the rows, and dS with pairs along the keys.
  E *keys_below, *queries_below = nullptr, *grad_outs_below = nullptr;
  E *probs_down = nullptr, *grad_scores_down = nullptr, *grad_scores_along = nullptr, *grad_scores_rest = nullptr;
  A *scores, *grad_scores, *cap, *grad_key, *grad_value, *lse, *delta, *grad_lse;
  A* grad_query;  // of a tile that no other block adds to: [rows, sums_width]
  const S** list;

  BackwardScratch(const AttentionParams& p, Arena& arena)
      : key_width(padded<A>(p.head_dim)),
        value_width(padded<A>(p.v_head_dim)),
        key_steps(steps<Operands>(p.head_dim)),
        value_steps(steps<Operands>(p.v_head_dim)),
        key_ld(steps<Operands>(key_width) + kLanes<A>),
        value_ld(steps<Operands>(value_width) + kLanes<A>),
        block(padded<A>(backward_block(p.head_dim, p.v_head_dim))),
        tile_steps(steps<Operands>(kTileQueryRows)),
        block_steps(steps<Operands>(block)) {
    query = arena.take<E>(kTileQueryRows * key_ld);
    grad_out = arena.take<E>(kTileQueryRows * value_ld);
    keys_t = arena.take<E>(block * key_steps);
    values_t = arena.take<E>(block * value_steps);
    if constexpr (kRounds<Operands>) {
      keys_below = arena.take<E>(block_steps * key_width);
      queries_below = arena.take<E>(tile_steps * key_width);
      grad_outs_below = arena.take<E>(tile_steps * value_width);
      probs_down = arena.take<E>(tile_steps * block);
      grad_scores_down = arena.take<E>(tile_steps * block);
      grad_scores_along = arena.take<E>(kTileQueryRows * block_steps);
      grad_scores_rest = arena.take<E>(kTileQueryRows * block_steps);
      keys = {keys_below, kPanel<A>, kPanel<A> * block_steps};
      queries = {queries_below, kPanel<A>, kPanel<A> * tile_steps};
      grad_outs = {grad_outs_below, kPanel<A>, kPanel<A> * tile_steps};
    } else {
      keys_below = arena.take<E>(block * key_ld);
      keys = {keys_below, key_ld, kPanel<A>};
      queries = {query, key_ld, kPanel<A>};
      grad_outs = {grad_out, value_ld, kPanel<A>};
    }
    scores = arena.take<A>(kTileQueryRows * block);
    grad_scores = arena.take<A>(kTileQueryRows * block);
    cap = arena.take<A>(block);
    grad_key = arena.take<A>(block * key_width);
    grad_value = arena.take<A>(block * value_width);
    lse = arena.take<A>(kTileQueryRows);
    delta = arena.take<A>(kTileQueryRows);
    grad_lse = arena.take<A>(kTileQueryRows);
    grad_query = arena.take<A>(kTileQueryRows * sums_width(p.head_dim));
    list = arena.take<const S*>(list_length<S>(p, block));
  }
};

template <class S, class A>
class KeyBlockGradients {
 public:
  KeyBlockGradients(const AttentionBackwardParams& bp, int64_t b, int64_t kv_head, void* scratch)
      : bp_(bp),
        mask_(bp.forward, b, {0, valid_keys(bp.forward, b)}),
        b_(b),
        kv_head_(kv_head),
        arena_(scratch),
        w_(p_, arena_) {}

  void compute(Range keys) {
    count_ = smaller(keys.end, valid_keys(p_, b_)) - keys.begin;
    clear(w_.grad_key, (keys.end - keys.begin) * w_.key_width);
    clear(w_.grad_value, (keys.end - keys.begin) * w_.value_width);
    if (count_ > 0) load_block(keys.begin);
    const int64_t rows = group_size(p_, kv_head_) * p_.q_len;
    // The last tile first: with causality the next block of keys, which another thread has, begins with the same tiles.
    // If this block began with tiles that only it sees, the other thread would wait for it.
    for (int64_t r = (rows - 1) / kTileQueryRows * kTileQueryRows; r >= 0; r -= kTileQueryRows) {
      make_rows(p_, b_, kv_head_, {r, smaller(rows, r + kTileQueryRows)}, mask_.keys(), tile_);
      add_tile_gradients(r, keys.begin);
    }
    if (bp_.wide_key_gradients)
      write_key_gradients<A>(keys);
    else
      write_key_gradients<S>(keys);
  }

 private:
  using Operands = OperandsOf<S, A>;
  using E = typename Operands::Element;

  static void clear(A* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] = 0;
  }
  template <class T>
  static void write(T* to, const A* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) store_one(to + i, from[i]);
  }

  template <class T>
  void write_key_gradients(Range keys) {
    for (int64_t j = 0; j < keys.end - keys.begin; ++j) {
      write(at<T>(bp_.grad_key, bp_.grad_key_strides, b_, kv_head_, keys.begin + j), w_.grad_key + j * w_.key_width,
            p_.head_dim);
      write(at<T>(bp_.grad_value, bp_.grad_value_strides, b_, kv_head_, keys.begin + j),
            w_.grad_value + j * w_.value_width, p_.v_head_dim);
    }
  }

  // Adds the gradients from one tile and one block: the tile starts at row `first` of the kv head, the block at key
  // `begin`.
  void add_tile_gradients(int64_t first, int64_t begin) {
    if (tile_.keys.empty()) {
      if (begin == 0)
        for (int64_t r = 0; r < tile_.count; ++r) clear_query_row(r);
      return;
    }
    const int64_t step = backward_block(p_.head_dim, p_.v_head_dim), block = begin / step;
    const int64_t first_block = tile_.keys.begin / step, last_block = (tile_.keys.end - 1) / step;
    if (block < first_block || block > last_block) return;
    load_rows();
    alone_ = first_block == last_block && (sizeof(S) < sizeof(A) || !p_.sinks);
    const int64_t count = smaller(count_, tile_.keys.end - begin);  // after these no row of the tile sees a key
    differentiate(begin, count);
    // -0.0 marks an excluded pair. Leaving such pairs out is slow, and is needed only where the other operand holds NaN
    // or Inf.
    const bool query_finite = all_finite(w_.query, w_.key_ld, tile_.count, w_.key_steps);
    const bool grad_out_finite = all_finite(w_.grad_out, w_.value_ld, tile_.count, w_.value_steps);
    const Factors f = factors(count, first_block == last_block);
    for_each_key_part(tile_, begin, count, [&](Range some, Range rows) {
      const int64_t first_step = rows.begin / Operands::kStep, of_rows = steps<Operands>(rows.end) - first_step;
      const auto add = [&](bool skip, const Operand<E>& left, const Panels<E>& right, int64_t columns, A* sums,
                           int64_t width) {
        gemm<A, E>(skip, some.end - some.begin, columns, of_rows,
                   {left.data + some.begin + first_step * w_.block, 1, w_.block}, right.part(first_step, 0),
                   sums + some.begin * width, width, true, kChain);
      };
      add(!grad_out_finite, f.probs_t, w_.grad_outs, p_.v_head_dim, w_.grad_value, w_.value_width);
      add(!query_finite, f.grad_scores_t, w_.queries, p_.head_dim, w_.grad_key, w_.key_width);
    });

    int32_t* done = bp_.blocks_done + (b_ * p_.num_kv_heads + kv_head_) * bp_.tiles + first / kTileQueryRows;
    const int64_t width = sums_width(p_.head_dim);
    const int64_t group_begin = p_.group_start ? p_.group_start[kv_head_] : kv_head_ * group_size(p_, kv_head_);
    const bool shared = first_block != last_block;
    A* sums = w_.grad_query;
    if (shared) {
      sums = static_cast<A*>(bp_.grad_query_sums) + ((b_ * p_.num_heads + group_begin) * p_.q_len + first) * width;
      wait_for(done, static_cast<int32_t>(block - first_block));
    }
    const auto add_query_gradients = [&](const Operand<E>& grad_scores, bool accumulate) {
      for_each_part<A>(tile_, begin, count, [&](Range rows, Range keys) {
        const int64_t first_step = keys.begin / Operands::kStep;
        gemm<A, E>(!keys_finite_, rows.end - rows.begin, p_.head_dim, steps<Operands>(keys.end) - first_step,
                   {grad_scores.data + rows.begin * grad_scores.row + first_step, grad_scores.row, 1},
                   w_.keys.part(first_step, 0), sums + rows.begin * width, width, accumulate, kChain);
      });
    };
    add_query_gradients(f.grad_scores, block > first_block);
    if (f.rest.data) add_query_gradients(f.rest, true);
    if (shared) __atomic_store_n(done, static_cast<int32_t>(block - first_block) + 1, __ATOMIC_RELEASE);
    if (block == last_block)
      for (int64_t r = 0; r < tile_.count; ++r) write(query_gradient(r), sums + r * width, p_.head_dim);
  }

  // Waits until the blocks before this one have added their part. Units are handed out in the order of the blocks, so
  // the unit that is waited for has already begun.
  static void wait_for(const int32_t* done, int32_t count) {
    for (int spins = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) != count; ++spins)
      if (spins > 1000) sched_yield();
  }

  S* query_gradient(int64_t r) const {
    return at<S>(bp_.grad_query, bp_.grad_query_strides, b_, tile_.rows[r].head, tile_.rows[r].query);
  }
  void clear_query_row(int64_t r) {
    for (int64_t d = 0; d < p_.head_dim; ++d) store_one(query_gradient(r) + d, A(0));
  }

  void load_block(int64_t begin) {
    with_rows(p_.key, p_.key_strides, begin, [&](const auto& keys) {
      Operands::pack_keys(keys, count_, p_.head_dim, w_.keys_t);
      if constexpr (kRounds<Operands>)
        pack_pair_panels(keys, count_, p_.head_dim, w_.keys_below, w_.block_steps);
      else
        for (int64_t j = 0; j < count_; ++j) pack(keys[j], p_.head_dim, w_.keys_below + j * w_.key_ld, w_.key_ld);
    });
    with_rows(p_.value, p_.value_strides, begin,
              [&](const auto& values) { Operands::pack_keys(values, count_, p_.v_head_dim, w_.values_t); });
    keys_finite_ =
        all_finite(w_.keys_t, kPanel<A> * w_.key_steps, padded<A>(count_) / kPanel<A>, kPanel<A> * w_.key_steps);
  }

  // Calls f with the rows of the block's keys in `from`, the keys or the values.
  template <class F>
  void with_rows(const void* from, const Strides& strides, int64_t begin, F&& f) const {
    if (p_.block_table)
      f(list_rows<S>(p_, from, strides, kv_head_, begin, count_, 0, w_.list));
    else
      f(StridedRows<S>{at<S>(from, strides, b_, kv_head_, begin), strides.row});
  }

  // The rows of the tile in a tensor.
  struct TileRows {
    const RowTile& tile;
    const void* base;
    const Strides& strides;
    int64_t b;
    const S* operator[](int64_t r) const { return at<S>(base, strides, b, tile.rows[r].head, tile.rows[r].query); }
  };

  void load_rows(const TileRows& from, int64_t columns, E* rows, int64_t ld, E* below) {
    for (int64_t r = 0; r < tile_.count; ++r) Operands::pack_row(from[r], columns, rows + r * ld, ld);
    if constexpr (kRounds<Operands>) pack_pair_panels(from, tile_.count, columns, below, w_.tile_steps);
  }

  void load_rows() {
    load_rows({tile_, p_.query, p_.query_strides, b_}, p_.head_dim, w_.query, w_.key_ld, w_.queries_below);
    load_rows({tile_, bp_.grad_out, bp_.grad_out_strides, b_}, p_.v_head_dim, w_.grad_out, w_.value_ld,
              w_.grad_outs_below);
    for (int64_t r = 0; r < tile_.count; ++r) {
      const int64_t index = (b_ * p_.num_heads + tile_.rows[r].head) * p_.q_len + tile_.rows[r].query;
      w_.lse[r] = static_cast<const A*>(p_.lse)[index];
      w_.delta[r] = static_cast<const A*>(bp_.delta)[index];
      w_.grad_lse[r] = bp_.grad_lse ? static_cast<const A*>(bp_.grad_lse)[index] : A(0);
    }
  }

  // scores <- P as it multiplied the values, grad_scores <- scale * dS; both [rows, count], with -0.0 for excluded
  // pairs.
  void differentiate(int64_t begin, int64_t count) {
    for_each_part<A>(tile_, begin, count, [&](Range rows, Range keys) {
      const auto multiply = [&](const E* left, int64_t ld, const E* right, int64_t depth, A* products) {
        gemm<A, E>(false, rows.end - rows.begin, keys.end - keys.begin, depth, {left + rows.begin * ld, ld, 1},
                   Panels<E>{right, kPanel<A>, kPanel<A> * depth}.part(0, keys.begin),
                   products + rows.begin * w_.block + keys.begin, w_.block, false, kChain);
      };
      multiply(w_.query, w_.key_ld, w_.keys_t, w_.key_steps, w_.scores);
      multiply(w_.grad_out, w_.value_ld, w_.values_t, w_.value_steps, w_.grad_scores);
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        differentiate_row(r, begin, keys);
        exclude(r, {0, keys.begin});
        exclude(r, {whole_vectors<A>(keys.end), whole_vectors<A>(count)});
      }
    });
  }

  // Marks the pairs of row r and `keys`, whole vectors, as excluded.
  void exclude(int64_t r, Range keys) {
    for (int64_t j = keys.begin; j < keys.end; j += kLanes<A>) {
      store<A>(w_.scores + r * w_.block + j, broadcast(A(-0.0)));
      store<A>(w_.grad_scores + r * w_.block + j, broadcast(A(-0.0)));
    }
  }

  // The left sides of the last three products: P and dS transposed, and dS. Where dS is rounded and the row has few
  // keys, SDPA's errors are small, and so dQ takes what was rounded off too.
  struct Factors {
    Operand<E> probs_t, grad_scores_t, grad_scores, rest{nullptr, 0, 0};
  };

  Factors factors(int64_t count, bool one_block) {
    if constexpr (!kRounds<Operands>) {
      return {{w_.scores, 1, w_.block}, {w_.grad_scores, 1, w_.block}, {w_.grad_scores, w_.block, 1}};
    } else {
      pair_down(w_.scores, count, w_.probs_down);
      pair_down(w_.grad_scores, count, w_.grad_scores_down);
      for (int64_t r = 0; r < tile_.count; ++r) {
        const A* row = w_.grad_scores + r * w_.block;
        E* rounded = w_.grad_scores_along + r * w_.block_steps;
        pair_along(row, count, rounded);
        if (one_block) pair_rest_along(row, rounded, count, w_.grad_scores_rest + r * w_.block_steps);
      }
      return {{w_.probs_down, 1, w_.block},
              {w_.grad_scores_down, 1, w_.block},
              {w_.grad_scores_along, w_.block_steps, 1},
              {one_block ? w_.grad_scores_rest : nullptr, w_.block_steps, 1}};
    }
  }

  // Rounds numbers [rows, block] to pairs along the rows, [rows / 2, block]. A missing row is excluded.
  void pair_down(const A* from, int64_t count, E* to) {
    for (int64_t r = 0; r < tile_.count; r += 2)
      for (int64_t j = 0; j < count; j += kLanes<A>) {
        const A* x = from + r * w_.block + j;
        const Vec<A> below = r + 1 < tile_.count ? load<A>(x + w_.block) : broadcast(A(-0.0));
        store<E>(to + r / 2 * w_.block + j, zipped(to_pairs(load<A>(x), below)));
      }
  }

  // keys: of the block, which begins at key `first`.
  void differentiate_row(int64_t r, int64_t first, Range keys) {
    const QueryRow& row = tile_.rows[r];
    const int64_t begin = first + keys.begin, count = keys.end - keys.begin, offset = r * w_.block + keys.begin;
    A *s = w_.scores + offset, *g = w_.grad_scores + offset;
    A* cap = p_.softcap > 0 ? w_.cap : nullptr;
    finish_scores<A>(p_, b_, row, begin, count, s, cap);
    const int64_t whole = whole_vectors<A>(count);
    // Huge scores of another kernel's forward pass may lie below these by many times their rounding, so lse may too.
    exponentials_of_row<Operands::kCoarse, true>(s, whole, scale_left<A>(p_), w_.lse[r]);
    if (p_.dropout_p > 0) {
      drop_row(row, begin, count, s, g, w_.delta[r]);
    } else {
      const A delta = alone_ ? delta_of_row(r, s, g, whole) : w_.delta[r];
      for (int64_t j = 0; j < whole; j += kLanes<A>) {
        const Vec<A> prob = load<A>(s + j);
        store<A>(g + j, where_attended(prob, prob * (load<A>(g + j) - delta)));
      }
    }
    if (bp_.grad_scores) {
      A* out = static_cast<A*>(bp_.grad_scores) + first_score(p_, b_, row.head, row.query);
      for (int64_t j = 0; j < count; ++j) out[key_number(p_, begin + j)] = g[j];
    }
    const A scale = static_cast<A>(p_.scale);
    for (int64_t j = 0; j < whole; j += kLanes<A>) {
      const Vec<A> slope = cap ? scale * load<A>(cap + j) : broadcast(scale);
      const Vec<A> gradient = load<A>(g + j);
      store<A>(g + j, where_attended(load<A>(s + j), gradient * slope));
    }
  }

  // rowsum(dO * O) - dlse of row r, whose keys are all in this block, from P and dP. It is closer, because O is
  // rounded, and dS is a difference that nearly cancels. P does not sum to one exactly, as lse is rounded.
  A delta_of_row(int64_t r, const A* probs, const A* grad_probs, int64_t count) const {
    Vec<A> products = broadcast(A(0)), sum = broadcast(A(0));
    for (int64_t j = 0; j < count; j += kLanes<A>) {
      const Vec<A> prob = load<A>(probs + j);
      products += where_attended(prob, prob * load<A>(grad_probs + j));
      sum += prob;
    }
    A total = fold_lanes<A>(sum, Add());
    if (p_.sinks) {
      // Who gives sinks may give out and lse of more keys than these (ring attention): then the sum is below one.
      total += exp_one<A>(static_cast<A>(p_.sinks[tile_.rows[r].head]) - w_.lse[r]);
      const A missing = total - 1;
      if (!(missing * missing < A(0x1p-20))) return w_.delta[r];
    }
    return (total > 0 ? fold_lanes<A>(products, Add()) / total : A(0)) - w_.grad_lse[r];
  }

  // Returns value where the pair is attended, and -0.0 where prob marks the pair as excluded.
  static Vec<A> where_attended(Vec<A> prob, Vec<A> value) {
    using Int = typename VectorTypes<A>::Int;
    const Int sign = bit_cast<Int>(prob);
    return sign == bit_cast<Int>(broadcast(A(-0.0))) ? broadcast(A(-0.0)) : value;
  }

  void drop_row(const QueryRow& row, int64_t begin, int64_t count, A* probs, A* g, A delta) {
    const A keep = static_cast<A>(p_.kept_factor);
    for (int64_t j = 0; j < count; ++j) {
      if (probs[j] == 0 && __builtin_signbit(probs[j])) {
        g[j] = A(-0.0);
        continue;
      }
      const A factor = dropped(p_, b_, row, begin + j) ? A(0) : keep;
      g[j] = probs[j] * (factor * g[j] - delta);
      probs[j] *= factor;
    }
  }

  // The longest chain of sums (kDepth in matmul.h). All sums end in dS, a difference that nearly cancels, so full-width
  // types use shorter chains. 16-bit results are rounded more than that anyway.
  static constexpr int64_t kChain = sizeof(S) < sizeof(A) ? kDepth : kDepth / 2;

  const AttentionBackwardParams& bp_;
  const SharedMask mask_;
  const AttentionParams& p_ = mask_.params();
  int64_t b_, kv_head_, count_ = 0;  // count_: how many keys the block has
  bool keys_finite_ = true;
  bool alone_ = false;  // whether this block has all keys that the tile sees; with sinks only where O is rounded
  Arena arena_;
  BackwardScratch<S, A> w_;
  RowTile tile_;
};

}  // namespace

size_t backward_scratch(const AttentionParams& p) { return scratch_bytes<BackwardScratch>(p); }

void backward(const AttentionBackwardParams& p, int64_t b, int64_t kv_head, Range keys, void* scratch) {
  dispatch_pairs(p.forward.dtype, [&](auto storage, auto accumulation) {
    KeyBlockGradients<decltype(storage), decltype(accumulation)>(p, b, kv_head, scratch).compute(keys);
  });
}

}  // namespace attnpack::ATTNPACK_ISA
