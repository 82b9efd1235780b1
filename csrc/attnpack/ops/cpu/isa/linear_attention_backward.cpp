#include <attnpack/ops/cpu/isa/linear_chunk.h>

// Gradients of linear attention. The states at the starts of the chunks, and the e of all tokens, are computed anew for
// one head at a time. Then the chunks are taken from the last to the first, with the gradient of the state behind them.
// The gradient of log_decay_r is the sum of the gradient times the value of all that a_r multiplies: pairs of tokens
// s < r <= t, what reaches tokens t >= r from the chunk's start, and what tokens s < r leave at its end.
namespace attnpack::ATTNPACK_ISA {
namespace {

template <class A>
struct BackwardScratch {
  Chunk<A> chunk;
  int64_t state_size;
  A* states;                                                 // at the start of each chunk
  A* errors;                                                 // e of all tokens, [length, value_ld]
  A* grad_state;                                             // [head_dim, value_ld]
  A *value, *grad_out, *deltas, *grad_deltas;                // [kChunk, value_ld]
  A* minus_grad_errors;                                      // as those
  A *grad_probs, *grad_overlaps;                             // [kChunk, score_ld]
  A *grad_query, *grad_key;                                  // [kChunk, key_ld]
  A *grad_query_decayed, *grad_key_decayed, *grad_key_left;  // as those
  A* grad_decay;                                             // [kChunk, key_ld], or a vector for each token
  A* grad_whole_decay;                                       // [key_ld]
  A* panels;                                                 // a state or deltas, transposed

  BackwardScratch(const LinearAttentionParams& p, Arena& arena) : chunk(p, arena) {
    const int64_t tokens = most_tokens(p), keys = kChunk * chunk.key_ld, values = kChunk * chunk.value_ld;
    state_size = p.head_dim * chunk.value_ld;
    states = arena.take<A>((tokens + kChunk - 1) / kChunk * state_size);
    errors = arena.take<A>(p.beta ? tokens * chunk.value_ld : 0);
    grad_state = arena.take<A>(state_size);
    value = arena.take<A>(values);
    grad_out = arena.take<A>(values);
    deltas = arena.take<A>(values);
    grad_deltas = arena.take<A>(values);
    minus_grad_errors = arena.take<A>(values);
    grad_probs = arena.take<A>(kChunk * chunk.score_ld);
    grad_overlaps = arena.take<A>(kChunk * chunk.score_ld);
    grad_query = arena.take<A>(keys);
    grad_key = arena.take<A>(keys);
    grad_query_decayed = arena.take<A>(keys);
    grad_key_decayed = arena.take<A>(keys);
    grad_key_left = arena.take<A>(keys);
    grad_decay = arena.take<A>(larger(keys, kChunk * kLanes<A>));
    grad_whole_decay = arena.take<A>(chunk.key_ld);
    panels = arena.take<A>(larger(padded<A>(p.head_dim), padded<A>(kChunk)) * p.v_head_dim);
  }
};

template <class A>
class LinearHeadGradients {
 public:
  // further: whether the gradients of query and key are added to those of other value heads.
  LinearHeadGradients(const LinearAttentionBackwardParams& bp, const LinearSequence& of, bool further, void* scratch)
      : bp_(bp),
        p_(bp.forward),
        of_(of),
        further_(further),
        arena_(scratch),
        w_(p_, arena_),
        c_(w_.chunk),
        ld_(c_.value_ld),
        key_ld_(c_.key_ld),
        score_ld_(c_.score_ld) {}

  void compute() {
    const int64_t chunks = (of_.count + kChunk - 1) / kChunk;
    for (int64_t i = 0; i < chunks; ++i) compute_state(i, i + 1 < chunks);
    load_state(p_, bp_.grad_state, of_.state(p_), w_.grad_state, ld_);
    for (int64_t i = chunks - 1; i >= 0; --i) differentiate(i);
    if (bp_.grad_initial_state) store_state(p_, w_.grad_state, ld_, bp_.grad_initial_state, of_.state(p_));
  }

 private:
  A* state(int64_t i) const { return w_.states + i * w_.state_size; }
  A* errors(int64_t i) const { return w_.errors + i * kChunk * ld_; }
  void load_chunk(int64_t i) {
    c_.load_tokens(of_, i * kChunk, smaller(kChunk, of_.count - i * kChunk));
    c_.apply_decays();
    load_rows(p_.dtype, p_.value, p_.value_strides, of_.b, of_.head, of_.first + i * kChunk, c_.count, p_.v_head_dim,
              w_.value, ld_);
  }

  // The errors of chunk i, and the state behind it if there is another chunk.
  void compute_state(int64_t i, bool has_next) {
    if (i == 0) load_state(p_, p_.initial_state, of_.state(p_), state(0), ld_);
    if (!has_next && !p_.beta) return;
    load_chunk(i);
    const int64_t dim = p_.head_dim, width = p_.v_head_dim;
    if (p_.beta) {
      c_.compute_scores(false, true);
      multiply(c_.count, width, dim, by_rows(c_.key_decayed, key_ld_), below(state(i), ld_), w_.deltas, ld_, false);
      for_each_value([&](int64_t v) { store<A>(w_.deltas + v, load<A>(w_.value + v) - load<A>(w_.deltas + v)); });
      c_.solve(w_.deltas, errors(i));
    }
    if (!has_next) return;
    __builtin_memcpy(state(i + 1), state(i), w_.state_size * sizeof(A));
    if (p_.log_decay) decay_state(c_.whole_decay, dim, width, state(i + 1), ld_);
    multiply(dim, width, c_.count, transposed(c_.key_left, key_ld_), below(p_.beta ? w_.deltas : w_.value, ld_),
             state(i + 1), ld_, true);
  }

  void differentiate(int64_t i) {
    load_chunk(i);
    load_rows(p_.dtype, bp_.grad_out, bp_.grad_out_strides, of_.b, of_.head, of_.first + i * kChunk, c_.count,
              p_.v_head_dim, w_.grad_out, ld_);
    c_.compute_scores(true, p_.beta);
    const int64_t count = c_.count, dim = p_.head_dim, width = p_.v_head_dim;
    if (p_.beta)
      for (int64_t t = 0; t < count; ++t)
        for_each_vector<A>(width, [&](int64_t v) {
          store<A>(w_.deltas + t * ld_ + v, c_.beta[t] * load<A>(errors(i) + t * ld_ + v));
        });
    const A* const deltas = p_.beta ? w_.deltas : w_.value;

    multiply(count, width, dim, by_rows(c_.key_left, key_ld_), below(w_.grad_state, ld_), w_.grad_deltas, ld_, false);
    c_.for_each_block([&](int64_t begin, int64_t end) {
      multiply(end - begin, width, count - begin, transposed(c_.probs + begin * score_ld_ + begin, score_ld_),
               below(w_.grad_out + begin * ld_, ld_), w_.grad_deltas + begin * ld_, ld_, true);
    });
    if (p_.beta) {
      for_each_value([&](int64_t v) { store<A>(w_.grad_deltas + v, -load<A>(w_.grad_deltas + v)); });
      c_.solve_transposed(w_.grad_deltas, w_.minus_grad_errors);
    }
    write_value_gradients(i);

    // The products with the states, and those of the scores with deltas.
    pack_transposed(StridedRows<A>{w_.grad_state, ld_}, dim, width, w_.panels);
    multiply(count, dim, width, by_rows(deltas, ld_), across(w_.panels, width), w_.grad_key_left, key_ld_, false);
    pack_transposed(StridedRows<A>{state(i), ld_}, dim, width, w_.panels);
    multiply(count, dim, width, by_rows<A>(w_.grad_out, ld_), across(w_.panels, width), w_.grad_query_decayed, key_ld_,
             false);
    if (p_.beta)
      multiply(count, dim, width, by_rows<A>(w_.minus_grad_errors, ld_), across(w_.panels, width), w_.grad_key_decayed,
               key_ld_, false);
    pack_transposed(StridedRows<A>{deltas, ld_}, count, width, w_.panels);
    c_.for_each_block([&](int64_t begin, int64_t end) {
      const auto products = [&](const A* rows, A* to) {
        multiply(end - begin, end, width, by_rows(rows + begin * ld_, ld_), across(w_.panels, width),
                 to + begin * score_ld_, score_ld_, false);
      };
      products(w_.grad_out, w_.grad_probs);
      if (p_.beta) products(w_.minus_grad_errors, w_.grad_overlaps);
    });

    differentiate_state(i);
    differentiate_decayed();
    p_.per_channel ? differentiate_scores_per_channel() : differentiate_scores();
    write_key_gradients(i);
  }

  // The gradient of the state before the chunk, and of the decay of the whole chunk.
  void differentiate_state(int64_t i) {
    if (p_.log_decay) {
      for (int64_t c = 0; c < p_.head_dim; ++c) {
        Vec<A> sum{};
        const A *grad = w_.grad_state + c * ld_, *old = state(i) + c * ld_;
        const int64_t whole = p_.v_head_dim / kLanes<A> * kLanes<A>;
        for (int64_t v = 0; v < whole; v += kLanes<A>) sum += load<A>(grad + v) * load<A>(old + v);
        A rest = 0;
        for (int64_t v = whole; v < p_.v_head_dim; ++v) rest += grad[v] * old[v];
        w_.grad_whole_decay[c] = c_.whole_decay[c] * (fold_lanes<A>(sum, Add()) + rest);
      }
      for (int64_t c = p_.head_dim; c < whole_vectors<A>(p_.head_dim); ++c) w_.grad_whole_decay[c] = 0;
      decay_state(c_.whole_decay, p_.head_dim, p_.v_head_dim, w_.grad_state, ld_);
    }
    const auto add = [&](const A* keys, const A* rows) {
      multiply(p_.head_dim, p_.v_head_dim, c_.count, transposed(keys, key_ld_), below(rows, ld_), w_.grad_state, ld_,
               true);
    };
    add(c_.query_decayed, w_.grad_out);
    if (p_.beta) add(c_.key_decayed, w_.minus_grad_errors);
  }

  A* grad_decay(int64_t t, int64_t c) const {
    return w_.grad_decay + (p_.per_channel ? t * key_ld_ + c : t * kLanes<A>);
  }
  void add_decay_gradient(int64_t t, int64_t c, Vec<A> x) const {
    A* const to = grad_decay(t, c);
    store<A>(to, load<A>(to) + x);
  }

  // Begins the gradients of query, key and decays by those of query_decayed, key_decayed and key_left.
  void differentiate_decayed() {
    const auto row = [&](const A* rows, int64_t t, int64_t c) { return load<A>(rows + t * key_ld_ + c); };
    for (int64_t i = 0; p_.log_decay && i < c_.count * (p_.per_channel ? key_ld_ : kLanes<A>); ++i)
      w_.grad_decay[i] = 0;
    c_.each_channel([&](int64_t c) {
      Vec<A> product = broadcast(A(1)), sum{};
      for (int64_t t = 0; t < c_.count; ++t) {
        if (p_.log_decay) product *= c_.decay_at(t, c);
        store<A>(w_.grad_query + t * key_ld_ + c, row(w_.grad_query_decayed, t, c) * product);
        store<A>(w_.grad_key + t * key_ld_ + c, p_.beta ? row(w_.grad_key_decayed, t, c) * product : Vec<A>{});
        if (!p_.log_decay) continue;
        add_decay_gradient(t, c, sum + load<A>(w_.grad_whole_decay + c));
        sum += row(w_.grad_key_left, t, c) * row(c_.key_left, t, c);
      }
      product = broadcast(A(1)), sum = Vec<A>{};
      for (int64_t t = c_.count - 1; t >= 0; --t) {
        A* const key = w_.grad_key + t * key_ld_ + c;
        store<A>(key, load<A>(key) + row(w_.grad_key_left, t, c) * product);
        if (!p_.log_decay) continue;
        product *= c_.decay_at(t, c);
        sum += row(w_.grad_query_decayed, t, c) * row(c_.query_decayed, t, c);
        if (p_.beta) sum += row(w_.grad_key_decayed, t, c) * row(c_.key_decayed, t, c);
        add_decay_gradient(t, c, sum);
      }
    });
  }

  // By one decay per head: the pairs' products with their spans, and then the products of matrices.
  void differentiate_scores() {
    A below_row[kChunk + kLanes<A>] = {};  // sums over tokens t >= r
    for (int64_t t = c_.count - 1; t >= 0; --t) {
      const int64_t row = t * score_ld_;
      for_each_vector<A>(t + 1, [&](int64_t s) {
        const Vec<A> span = load<A>(c_.spans + row + s), none{};
        A *const grad_prob = w_.grad_probs + row + s, *const grad_overlap = w_.grad_overlaps + row + s;
        const Vec<A> by_prob = span == 0 ? none : load<A>(grad_prob);
        const Vec<A> by_overlap = span == 0 || !p_.beta ? none : load<A>(grad_overlap);
        Vec<A> sum = load<A>(below_row + s) + by_prob * load<A>(c_.probs + row + s);
        if (p_.beta) sum -= by_overlap * load<A>(c_.overlaps + row + s);
        store<A>(below_row + s, sum);
        store<A>(grad_prob, by_prob * span);
        if (p_.beta) store<A>(grad_overlap, by_overlap * span);
      });
      if (p_.beta) w_.grad_overlaps[row + t] = 0;
      const int64_t end = smaller(t / kBlock * kBlock + kBlock, c_.count);
      for (int64_t s = t + 1; s < end; ++s) w_.grad_probs[row + s] = w_.grad_overlaps[row + s] = 0;
      if (!p_.log_decay) continue;
      A sum = 0;
      for (int64_t s = 0; s < t; ++s) sum += below_row[s];
      *grad_decay(t, 0) += sum;
    }
    c_.for_each_block([&](int64_t begin, int64_t end) {
      const auto add = [&](const A* grads, const A* rows, A* by_row, const A* columns) {
        multiply(end - begin, p_.head_dim, end, by_rows(grads + begin * score_ld_, score_ld_), below(rows, key_ld_),
                 by_row + begin * key_ld_, key_ld_, true);
        multiply(end - begin, p_.head_dim, c_.count - begin, transposed(grads + begin * score_ld_ + begin, score_ld_),
                 below(columns + begin * key_ld_, key_ld_), w_.grad_key + begin * key_ld_, key_ld_, true);
      };
      add(w_.grad_probs, c_.key, w_.grad_query, c_.query);
      if (p_.beta) add(w_.grad_overlaps, c_.key, w_.grad_key, c_.key);
    });
  }

  void differentiate_scores_per_channel() {
    // The gradients from the products of a block with the keys before it. They lie in buffers that are free by now.
    A *const by_query = w_.grad_query_decayed, *const by_key = w_.grad_key_decayed, *const earlier = w_.grad_key_left;
    c_.for_each_block([&](int64_t begin, int64_t end) {
      c_.begin_block(begin, end);
      if (begin > 0) {
        const auto add = [&](const A* grads, A* to, const A* rows, bool accumulate) {
          const A* const block = grads + begin * score_ld_;
          multiply(end - begin, p_.head_dim, begin, by_rows(block, score_ld_), below<A>(c_.earlier_keys, key_ld_), to,
                   key_ld_, false);
          multiply(begin, p_.head_dim, end - begin, transposed(block, score_ld_), below(rows, key_ld_), earlier,
                   key_ld_, accumulate);
        };
        add(w_.grad_probs, by_query, c_.block_query, false);
        if (p_.beta) add(w_.grad_overlaps, by_key, c_.block_key, true);
        c_.each_channel([&](int64_t c) { add_earlier_pairs(begin, end, c, by_query, by_key, earlier); });
      }
      c_.each_channel([&](int64_t c) {
        for (int64_t t = begin; t < end; ++t) add_pairs_within_block(begin, t, c);
      });
    });
  }

  void add_earlier_pairs(int64_t begin, int64_t end, int64_t c, const A* by_query, const A* by_key, const A* earlier) {
    Vec<A> sum{};
    for (int64_t t = end - 1; t >= begin; --t) {
      const int64_t row = (t - begin) * key_ld_ + c;
      const Vec<A> span = c_.load_at(c_.from_start, t, c);
      sum += load<A>(by_query + row) * load<A>(c_.block_query + row);
      add_to(w_.grad_query, t, c, load<A>(by_query + row) * span);
      if (p_.beta) {
        sum += load<A>(by_key + row) * load<A>(c_.block_key + row);
        add_to(w_.grad_key, t, c, load<A>(by_key + row) * span);
      }
      add_decay_gradient(t, c, sum);
    }
    sum = Vec<A>{};
    for (int64_t s = 0; s < begin; ++s) {
      add_decay_gradient(s, c, sum);
      const Vec<A> grad = c_.load_at(earlier, s, c);
      add_to(w_.grad_key, s, c, grad * c_.load_at(c_.to_end, s, c));
      sum += grad * c_.load_at(c_.earlier_keys, s, c);
    }
  }

  // Token t with the tokens s <= t of its block.
  void add_pairs_within_block(int64_t begin, int64_t t, int64_t c) {
    const Vec<A> query = c_.load_at(c_.query, t, c), key = c_.load_at(c_.key, t, c);
    Vec<A> span = broadcast(A(1)), by_query{}, by_key{}, pair[kBlock];
    for (int64_t s = t; s >= begin; --s) {
      const A grad_prob = w_.grad_probs[t * score_ld_ + s];
      const A grad_overlap = p_.beta && s < t ? w_.grad_overlaps[t * score_ld_ + s] : A(0);
      const Vec<A> kept = c_.load_at(c_.key, s, c) * span, grad = grad_prob * query + grad_overlap * key;
      by_query += grad_prob * kept;
      by_key += grad_overlap * kept;
      add_to(w_.grad_key, s, c, grad * span);
      pair[s - begin] = grad * kept;
      span *= c_.decay_at(s, c);
    }
    add_to(w_.grad_query, t, c, by_query);
    add_to(w_.grad_key, t, c, by_key);
    Vec<A> sum{};
    for (int64_t r = begin + 1; r <= t; ++r) {
      sum += pair[r - 1 - begin];
      add_decay_gradient(r, c, sum);
    }
  }

  void add_to(A* rows, int64_t t, int64_t c, Vec<A> x) const {
    A* const to = rows + t * key_ld_ + c;
    store<A>(to, load<A>(to) + x);
  }
  // f(v) for each vector of the chunk's rows of values.
  template <class F>
  void for_each_value(F&& f) const {
    for (int64_t t = 0; t < c_.count; ++t) for_each_vector<A>(p_.v_head_dim, [&](int64_t v) { f(t * ld_ + v); });
  }

  // The row of the chunk's token 0 in a contiguous tensor [batch, heads, length].
  int64_t first_row(int64_t heads, int64_t head, int64_t i) const {
    return (of_.b * heads + head) * p_.length + of_.first + i * kChunk;
  }

  void write_value_gradients(int64_t i) {
    const int64_t row = first_row(p_.num_heads, of_.head, i);
    const A* const from = p_.beta ? w_.minus_grad_errors : w_.grad_deltas;
    const A sign = p_.beta ? A(-1) : A(1);
    with_storage<A>(p_.dtype, [&](auto storage) {
      auto* const value = static_cast<decltype(storage)*>(bp_.grad_value) + row * p_.v_head_dim;
      for (int64_t t = 0; t < c_.count; ++t)
        for (int64_t v = 0; v < p_.v_head_dim; ++v) store_one(value + t * p_.v_head_dim + v, sign * from[t * ld_ + v]);
    });
    if (!bp_.grad_beta) return;
    for (int64_t t = 0; t < c_.count; ++t) {
      A sum = 0;
      for (int64_t v = 0; v < p_.v_head_dim; ++v) sum -= w_.grad_deltas[t * ld_ + v] * errors(i)[t * ld_ + v];
      static_cast<A*>(bp_.grad_beta)[row + t] = sum;
    }
  }

  void write_key_gradients(int64_t i) {
    const int64_t dim = p_.head_dim, row = first_row(p_.num_key_heads, of_.key_head, i);
    const auto write = [&]<class S>(S, const A* from, A factor, void* to) {
      for (int64_t t = 0; t < c_.count; ++t) {
        S* const x = static_cast<S*>(to) + (row + t) * dim;
        for (int64_t c = 0; c < dim; ++c)
          store_one(x + c, (further_ ? load_one(x + c) : A(0)) + factor * from[t * key_ld_ + c]);
      }
    };
    const auto write_both = [&](auto storage) {
      write(storage, w_.grad_query, static_cast<A>(p_.scale), bp_.grad_query);
      write(storage, w_.grad_key, A(1), bp_.grad_key);
    };
    p_.num_heads == p_.num_key_heads ? with_storage<A>(p_.dtype, write_both) : write_both(A{});
    if (!bp_.grad_log_decay) return;
    A* const decay = static_cast<A*>(bp_.grad_log_decay);
    const int64_t of_head = first_row(p_.num_heads, of_.head, i);
    for (int64_t t = 0; t < c_.count; ++t)
      if (p_.per_channel)
        for (int64_t c = 0; c < dim; ++c) decay[(of_head + t) * dim + c] = w_.grad_decay[t * key_ld_ + c];
      else
        decay[of_head + t] = fold_lanes<A>(load<A>(w_.grad_decay + t * kLanes<A>), Add());
  }

  const LinearAttentionBackwardParams& bp_;
  const LinearAttentionParams& p_;
  const LinearSequence of_;
  const bool further_;
  Arena arena_;
  BackwardScratch<A> w_;
  Chunk<A>& c_;
  const int64_t ld_, key_ld_, score_ld_;
};

}  // namespace

size_t linear_attention_backward_scratch(const LinearAttentionBackwardParams& bp) {
  Arena arena(nullptr);
  with_accumulation(bp.forward.dtype, [&](auto a) { BackwardScratch<decltype(a)>(bp.forward, arena); });
  return arena.used();
}

void linear_attention_backward(const LinearAttentionBackwardParams& bp, int64_t sequence, int64_t key_head,
                               void* scratch) {
  const LinearAttentionParams& p = bp.forward;
  const int64_t group = p.num_heads / p.num_key_heads;
  with_accumulation(p.dtype, [&](auto a) {
    for (int64_t i = 0; i < group; ++i)
      LinearHeadGradients<decltype(a)>(bp, LinearSequence(p, sequence, key_head * group + i), i > 0, scratch).compute();
  });
}

}  // namespace attnpack::ATTNPACK_ISA
