#include <attnpack/ops/cpu/isa/linear_chunk.h>

// Linear attention, forward: a head of a sequence in chunks (linear_chunk.h), or token by token where there are few.
namespace attnpack::ATTNPACK_ISA {
namespace {

// Up to so many tokens are steps: each reads and writes the state, where a chunk packs its tokens first.
constexpr int64_t kSteps = 2;

template <class A>
struct ForwardScratch {
  Chunk<A> chunk;
  A *state, *deltas, *out, *value;  // [head_dim, value_ld], [kChunk, value_ld]
  A* row;                           // of a step: its products with the state, and d

  ForwardScratch(const LinearAttentionParams& p, Arena& arena) : chunk(p, arena) {
    state = arena.take<A>(p.head_dim * chunk.value_ld);
    deltas = arena.take<A>(kChunk * chunk.value_ld);
    out = arena.take<A>(kChunk * chunk.value_ld);
    value = arena.take<A>(kChunk * chunk.value_ld);
    row = arena.take<A>(2 * chunk.value_ld);
  }
};

template <class A>
class LinearHead {
 public:
  LinearHead(const LinearAttentionParams& p, const LinearSequence& of, void* scratch)
      : p_(p), of_(of), arena_(scratch), w_(p, arena_), c_(w_.chunk), ld_(c_.value_ld) {}

  void compute() {
    if (of_.count <= kSteps) {
      A* const to = static_cast<A*>(p_.state) + of_.state(p_);
      const A* const from = p_.initial_state ? static_cast<const A*>(p_.initial_state) + of_.state(p_) : nullptr;
      if (of_.count == 0) return copy_state(from, to);
      c_.load_tokens(of_, 0, of_.count);
      load_values(0);
      for (int64_t t = 0; t < of_.count; ++t) step(t, t == 0 ? from : to, p_.v_head_dim, to, p_.v_head_dim);
      return store_out(0);
    }
    load_state(p_, p_.initial_state, of_.state(p_), w_.state, ld_);
    for (int64_t begin = 0; begin < of_.count; begin += kChunk) {
      c_.load_tokens(of_, begin, smaller(kChunk, of_.count - begin));
      load_values(begin);
      if (c_.is_finite() && all_finite(w_.value, ld_, c_.count, ld_))
        advance(begin);
      else
        for (int64_t t = 0; t < c_.count; ++t) step(t, w_.state, ld_, w_.state, ld_);
      store_out(begin);
    }
    store_state(p_, w_.state, ld_, p_.state, of_.state(p_));
  }

 private:
  void load_values(int64_t begin) {
    load_rows(p_.dtype, p_.value, p_.value_strides, of_.b, of_.head, of_.first + begin, c_.count, p_.v_head_dim,
              w_.value, ld_);
  }
  void store_out(int64_t begin) {
    store_rows(p_.dtype, w_.out, ld_, c_.count, p_.v_head_dim, p_.out, p_.out_strides, of_.b, of_.head,
               of_.first + begin);
  }
  void copy_state(const A* from, A* to) const {
    const int64_t numbers = p_.head_dim * p_.v_head_dim;
    for (int64_t i = 0; i < numbers; ++i) to[i] = from ? from[i] : A(0);
  }

  // A whole chunk, by matrix products.
  void advance(int64_t begin) {
    RowFetcher next = next_rows(p_, of_, begin);
    c_.apply_decays();
    c_.compute_scores(true, p_.beta);
    const int64_t count = c_.count, dim = p_.head_dim, width = p_.v_head_dim;
    const A* deltas = w_.value;
    if (p_.beta) {
      multiply(count, width, dim, by_rows(c_.key_decayed, c_.key_ld), below(w_.state, ld_), w_.deltas, ld_, false);
      for (int64_t t = 0; t < count; ++t)
        for_each_vector<A>(width, [&](int64_t v) {
          A* const delta = w_.deltas + t * ld_ + v;
          store<A>(delta, load<A>(w_.value + t * ld_ + v) - load<A>(delta));
        });
      c_.solve(w_.deltas, nullptr);
      deltas = w_.deltas;
    }
    multiply(count, width, dim, by_rows(c_.query_decayed, c_.key_ld), below(w_.state, ld_), w_.out, ld_, false,
             {&next});
    c_.for_each_block([&](int64_t first, int64_t end) {
      multiply(end - first, width, end, by_rows(c_.probs + first * c_.score_ld, c_.score_ld), below(deltas, ld_),
               w_.out + first * ld_, ld_, true);
    });
    if (p_.log_decay) decay_state(c_.whole_decay, dim, width, w_.state, ld_);
    multiply(dim, width, count, transposed(c_.key_left, c_.key_ld), below(deltas, ld_), w_.state, ld_, true, {&next});
  }

  // Token t of the chunk, by the recurrence. The state is read for its products with k, if there are any, and then once
  // more, from a cache, to be written. from: null for zeros.
  void step(int64_t t, const A* from, int64_t from_ld, A* to, int64_t to_ld) {
    const int64_t dim = p_.head_dim, width = p_.v_head_dim;
    const A *q = c_.query + t * c_.key_ld, *k = c_.key + t * c_.key_ld, *value = w_.value + t * ld_;
    A *by_key = w_.row, *delta = w_.row + ld_, *out = w_.out + t * ld_;
    const auto decay = [&](int64_t c) {
      return !p_.log_decay ? A(1) : p_.per_channel ? c_.decay[t * c_.key_ld + c] : c_.decay[t];
    };
    for (int64_t v = 0; v < width; ++v) by_key[v] = out[v] = 0;
    if (from && p_.beta) {
      const auto add = [&]<int Rows>(std::integral_constant<int, Rows>, int64_t c) {
        A keys[Rows];
        for (int i = 0; i < Rows; ++i) keys[i] = decay(c + i) * k[c + i];
        add_products<Rows>(from + c * from_ld, from_ld, keys, by_key);
      };
      int64_t c = 0;
      for (; c + 4 <= dim; c += 4) add(std::integral_constant<int, 4>(), c);
      for (; c < dim; ++c) add(std::integral_constant<int, 1>(), c);
    }
    for (int64_t v = 0; v < width; ++v) delta[v] = p_.beta ? c_.beta[t] * (value[v] - by_key[v]) : value[v];
    for (int64_t c = 0; c < dim; ++c)
      advance_row(from ? from + c * from_ld : nullptr, decay(c), k[c], q[c], delta, to + c * to_ld, out);
  }

  // How far ahead a state is prefetched to be read, and to be written.
  static constexpr int64_t kReadAhead = 6144 / sizeof(A), kWriteAhead = 1024 / sizeof(A);

  // sum += factors^T rows, for rows whose sum is read and written once.
  template <int Rows>
  void add_products(const A* rows, int64_t ld, const A (&factors)[Rows], A* sum) const {
    each_column(p_.v_head_dim, [&]<class V>(V, int64_t v) {
      constexpr int64_t kLineNumbers = kLine / sizeof(A);
      for (int64_t i = 0; Rows > 1 && i * sizeof(A) < Rows * sizeof(V); i += kLineNumbers)
        fetch(rows + v * Rows + kReadAhead + i);
      V x = load_bits<V>(sum + v);
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i) x += factors[i] * load_bits<V>(rows + i * ld + v);
      __builtin_memcpy(sum + v, &x, sizeof(V));
    });
  }

  // A row of the state: kept * old + key * delta. out += query * row.
  void advance_row(const A* old, A kept, A key, A query, const A* delta, A* to, A* out) const {
    each_column(p_.v_head_dim, [&]<class V>(V, int64_t v) {
      if (v * sizeof(A) % kLine == 0) __builtin_prefetch(to + v + kWriteAhead, 1);
      V x = key * load_bits<V>(delta + v);
      if (old) x += kept * load_bits<V>(old + v);
      const V sum = load_bits<V>(out + v) + query * x;
      __builtin_memcpy(to + v, &x, sizeof(V));
      __builtin_memcpy(out + v, &sum, sizeof(V));
    });
  }

  // f(V{}, v) for whole vectors, and then for single numbers: a row of a tensor has no padding.
  template <class F>
  static void each_column(int64_t width, F&& f) {
    int64_t v = 0;
    for (; v + kLanes<A> <= width; v += kLanes<A>) f(Vec<A>{}, v);
    for (; v < width; ++v) f(A{}, v);
  }

  const LinearAttentionParams& p_;
  const LinearSequence of_;
  Arena arena_;
  ForwardScratch<A> w_;
  Chunk<A>& c_;
  const int64_t ld_;
};

}  // namespace

size_t linear_attention_scratch(const LinearAttentionParams& p) {
  Arena arena(nullptr);
  with_accumulation(p.dtype, [&](auto a) { ForwardScratch<decltype(a)>(p, arena); });
  return arena.used();
}

void linear_attention(const LinearAttentionParams& p, int64_t sequence, int64_t head, void* scratch) {
  with_accumulation(p.dtype,
                    [&](auto a) { LinearHead<decltype(a)>(p, LinearSequence(p, sequence, head), scratch).compute(); });
}

}  // namespace attnpack::ATTNPACK_ISA
