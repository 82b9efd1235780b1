#include <attnpack/ops/cpu/isa/tile.h>

// Backward (Dao et al. 2022, algorithm 4): probabilities are recomputed from lse, tile by tile. With P the
// probabilities, D = rowsum(dO * O) - dlse and dS = P * (dO V^T - D):  dV = P^T dO,  dQ = scale dS K,  dK = scale dS^T
// Q. Blocks of keys and tiles of rows are units of their own, so that every sum has one fixed order.
namespace attnpack::ATTNPACK_ISA {
namespace {

constexpr bool kTwice[] = {false, true};  // fast, then leaving excluded pairs out

template <class S, class A>
struct Scratch {
  int64_t key_width, value_width, block;
  PackedBlocks blocks;
  // Rows: as they are (left-hand sides), and in panels (right-hand sides).
  A *query, *grad_out, *query_panels, *grad_out_panels;
  A *keys, *keys_t, *values_t;  // slots of blocks: keys in panels, keys and values transposed
  A *scores, *grad_scores, *cap, *grad_a, *grad_b, *lse, *delta;

  Scratch(const AttentionParams& p, Arena& arena)
      : block(padded<A>(kBackwardKeys)), blocks(p.kv_len, kBackwardKeys, arena) {
    key_width = padded<A>(p.head_dim);
    value_width = padded<A>(p.v_head_dim);
    query = arena.take<A>(kTileQueryRows * p.head_dim);
    grad_out = arena.take<A>(kTileQueryRows * p.v_head_dim);
    query_panels = arena.take<A>(kTileQueryRows * key_width);
    grad_out_panels = arena.take<A>(kTileQueryRows * value_width);
    keys = arena.take<A>(blocks.slots() * block * key_width);
    keys_t = arena.take<A>(blocks.slots() * block * p.head_dim);
    values_t = arena.take<A>(blocks.slots() * block * p.v_head_dim);
    scores = arena.take<A>(kTileQueryRows * block);
    grad_scores = arena.take<A>(kTileQueryRows * block);
    cap = arena.take<A>(block);
    grad_a = arena.take<A>(larger(kTileQueryRows, block) * key_width);  // of keys, or of queries
    grad_b = arena.take<A>(block * value_width);                        // of values
    lse = arena.take<A>(kTileQueryRows);
    delta = arena.take<A>(kTileQueryRows);
  }
};

template <class S, class A>
class Backward {
 public:
  Backward(const AttentionBackwardParams& bp, int64_t b, int64_t kv_head, void* scratch)
      : bp_(bp), p_(bp.forward), b_(b), kv_head_(kv_head), arena_(scratch), w_(p_, arena_) {
    w_.blocks.enter(b * p_.num_kv_heads + kv_head);
  }

  // dK and dV of keys [begin, end).
  void run_keys(Range keys) {
    const int64_t count = keys.end - keys.begin;
    const int64_t used = smaller(keys.end, valid_keys(p_, b_)) - keys.begin;
    for (const bool skip : kTwice) {
      clear(w_.grad_a, count * w_.key_width);
      clear(w_.grad_b, count * w_.value_width);
      if (used > 0) {
        const int64_t rows = group_size(p_, kv_head_) * p_.q_len;
        for (int64_t r = 0; r < rows; r += kTileQueryRows) {
          make_rows(p_, b_, kv_head_, {r, smaller(rows, r + kTileQueryRows)}, tile_);
          if (tile_.keys.begin >= keys.begin + used || tile_.keys.end <= keys.begin) continue;
          load_rows();
          load_row_panels();
          differentiate(keys.begin, used, false);
          gemm<A>(skip, used, w_.value_width, tile_.count, {w_.scores, 1, w_.block},
                  {w_.grad_out_panels, kPanel<A>, kTileQueryRows * kPanel<A>}, w_.grad_b, w_.value_width, true);
          gemm<A>(skip, used, w_.key_width, tile_.count, {w_.grad_scores, 1, w_.block},
                  {w_.query_panels, kPanel<A>, kTileQueryRows * kPanel<A>}, w_.grad_a, w_.key_width, true);
        }
      }
      // 0 * NaN of an excluded pair: once more without such terms.
      if (all_finite(w_.grad_a, w_.key_width, count, p_.head_dim) &&
          all_finite(w_.grad_b, w_.value_width, count, p_.v_head_dim))
        break;
    }
    for (int64_t j = 0; j < count; ++j) {
      write(at<S>(bp_.grad_key, bp_.grad_key_strides, b_, kv_head_, keys.begin + j), w_.grad_a + j * w_.key_width,
            p_.head_dim);
      write(at<S>(bp_.grad_value, bp_.grad_value_strides, b_, kv_head_, keys.begin + j), w_.grad_b + j * w_.value_width,
            p_.v_head_dim);
    }
  }

  // dQ of a tile of rows, and the gradient of the masked scores where it is asked for.
  void run_rows(Range rows) {
    make_rows(p_, b_, kv_head_, rows, tile_);
    load_rows();
    for (const bool skip : kTwice) {
      clear(w_.grad_a, tile_.count * w_.key_width);
      for (int64_t begin = tile_.keys.begin / kBackwardKeys * kBackwardKeys; begin < tile_.keys.end;
           begin += kBackwardKeys) {
        const int64_t count = smaller(kBackwardKeys, tile_.keys.end - begin);
        const int64_t slot = differentiate(begin, count, bp_.grad_scores != nullptr);
        gemm<A>(skip, tile_.count, w_.key_width, count, {w_.grad_scores, w_.block, 1},
                {w_.keys + slot * w_.block * w_.key_width, kPanel<A>, w_.block * kPanel<A>}, w_.grad_a, w_.key_width,
                true);
      }
      if (all_finite(w_.grad_a, w_.key_width, tile_.count, p_.head_dim)) break;
    }
    for (int64_t r = 0; r < tile_.count; ++r)
      write(at<S>(bp_.grad_query, bp_.grad_query_strides, b_, tile_.rows[r].head, tile_.rows[r].query),
            w_.grad_a + r * w_.key_width, p_.head_dim);
  }

 private:
  static void clear(A* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] = 0;
  }
  static void write(S* to, const A* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) store_one(to + i, from[i]);
  }

  void pack_block(int64_t begin, int64_t slot) {
    const int64_t count = smaller(kBackwardKeys, valid_keys(p_, b_) - begin);
    const S* keys = at<S>(p_.key, p_.key_strides, b_, kv_head_, begin);
    pack_panels<A>(keys, p_.key_strides.row, count, p_.head_dim, w_.keys + slot * w_.block * w_.key_width, w_.block);
    pack_transposed<A>(keys, p_.key_strides.row, count, p_.head_dim, w_.keys_t + slot * w_.block * p_.head_dim);
    pack_transposed<A>(at<S>(p_.value, p_.value_strides, b_, kv_head_, begin), p_.value_strides.row, count,
                       p_.v_head_dim, w_.values_t + slot * w_.block * p_.v_head_dim);
  }

  void load_rows() {
    pack_rows<A, S>(tile_, p_.query, p_.query_strides, b_, p_.head_dim, w_.query, p_.head_dim);
    pack_rows<A, S>(tile_, bp_.grad_out, bp_.grad_out_strides, b_, p_.v_head_dim, w_.grad_out, p_.v_head_dim);
    for (int64_t r = 0; r < tile_.count; ++r) {
      const int64_t index = (b_ * p_.num_heads + tile_.rows[r].head) * p_.q_len + tile_.rows[r].query;
      w_.lse[r] = static_cast<const A*>(p_.lse)[index];
      w_.delta[r] = static_cast<const A*>(bp_.delta)[index];
    }
  }

  void load_row_panels() {
    pack_panels<A>(w_.query, p_.head_dim, tile_.count, p_.head_dim, w_.query_panels, kTileQueryRows);
    pack_panels<A>(w_.grad_out, p_.v_head_dim, tile_.count, p_.v_head_dim, w_.grad_out_panels, kTileQueryRows);
  }

  // scores <- P (what multiplied the values), grad_scores <- scale * dS, both [rows, count], excluded pairs -0.0.
  // Returns the slot of the packed block of keys.
  int64_t differentiate(int64_t begin, int64_t count, bool write_mask_gradient) {
    const int64_t slot = w_.blocks.slot(begin, [&](int64_t slot) { pack_block(begin, slot); });
    gemm<A>(false, tile_.count, count, p_.head_dim, {w_.query, p_.head_dim, 1},
            {w_.keys_t + slot * w_.block * p_.head_dim, kPanel<A>, kPanel<A> * p_.head_dim}, w_.scores, w_.block,
            false);
    gemm<A>(false, tile_.count, count, p_.v_head_dim, {w_.grad_out, p_.v_head_dim, 1},
            {w_.values_t + slot * w_.block * p_.v_head_dim, kPanel<A>, kPanel<A> * p_.v_head_dim}, w_.grad_scores,
            w_.block, false);
    for (int64_t r = 0; r < tile_.count; ++r) differentiate_row(r, begin, count, write_mask_gradient);
    return slot;
  }

  void differentiate_row(int64_t r, int64_t begin, int64_t count, bool write_mask_gradient) {
    const Row& row = tile_.rows[r];
    A *s = w_.scores + r * w_.block, *g = w_.grad_scores + r * w_.block;
    A* cap = p_.softcap > 0 ? w_.cap : nullptr;
    finish_scores<A>(p_, b_, row, begin, count, s, cap);
    const A factor = scale_left<A>(p_);
    const int64_t whole = (count + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
    const Vec<A> excluded = broadcast(A(-0.0));
    for (int64_t j = 0; j < whole; j += kLanes<A>) {
      const Vec<A> x = load<A>(s + j);
      store<A>(s + j, x == A(-kInfinity) ? excluded : exp(x * factor - w_.lse[r]));
    }
    if (p_.dropout_p > 0)
      drop_row(row, begin, count, s, g, w_.delta[r]);
    else
      for (int64_t j = 0; j < whole; j += kLanes<A>) {
        const Vec<A> prob = load<A>(s + j);
        store<A>(g + j, masked(prob, prob * (load<A>(g + j) - w_.delta[r])));
      }
    if (write_mask_gradient) {
      A* out = static_cast<A*>(bp_.grad_scores) + ((b_ * p_.num_heads + row.head) * p_.q_len + row.query) * p_.kv_len +
               begin;
      for (int64_t j = 0; j < count; ++j) out[j] = g[j];
    }
    const A scale = static_cast<A>(p_.scale);
    for (int64_t j = 0; j < whole; j += kLanes<A>) {
      const Vec<A> slope = cap ? scale * load<A>(cap + j) : broadcast(scale);
      const Vec<A> gradient = load<A>(g + j);
      store<A>(g + j, masked(load<A>(s + j), gradient * slope));
    }
  }

  // value where the pair is attended, -0.0 where prob says that it is excluded.
  static Vec<A> masked(Vec<A> prob, Vec<A> value) {
    using Int = typename VectorTypes<A>::Int;
    const Int sign = bit_cast<Int>(prob);
    return sign == bit_cast<Int>(broadcast(A(-0.0))) ? broadcast(A(-0.0)) : value;
  }

  void drop_row(const Row& row, int64_t begin, int64_t count, A* probs, A* g, A delta) {
    const A keep = static_cast<A>(1 / (1 - p_.dropout_p));
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

  const AttentionBackwardParams& bp_;
  const AttentionParams& p_;
  int64_t b_, kv_head_;
  Arena arena_;
  Scratch<S, A> w_;
  RowTile tile_;
};

}  // namespace

size_t backward_scratch(const AttentionParams& p) {
  size_t used = 0;
  dispatch(p.dtype, [&](auto storage, auto accumulation) {
    Arena arena(nullptr);
    Scratch<decltype(storage), decltype(accumulation)>(p, arena);
    used = arena.used();
  });
  return used;
}

void backward_keys(const AttentionBackwardParams& p, int64_t b, int64_t kv_head, Range keys, void* scratch) {
  dispatch(p.forward.dtype, [&](auto storage, auto accumulation) {
    Backward<decltype(storage), decltype(accumulation)>(p, b, kv_head, scratch).run_keys(keys);
  });
}

void backward_rows(const AttentionBackwardParams& p, int64_t b, int64_t kv_head, Range rows, void* scratch) {
  dispatch(p.forward.dtype, [&](auto storage, auto accumulation) {
    Backward<decltype(storage), decltype(accumulation)>(p, b, kv_head, scratch).run_rows(rows);
  });
}

}  // namespace attnpack::ATTNPACK_ISA
