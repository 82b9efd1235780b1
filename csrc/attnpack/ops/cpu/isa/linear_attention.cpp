#include <attnpack/ops/cpu/isa/linear_chunk.h>

// Linear attention, forward: value heads of one key head of a sequence in chunks (linear_chunk.h), which share what no
// decay changes; or token by token where there are few.
namespace attnpack::ATTNPACK_ISA {
namespace {

// Up to so many tokens are steps: each reads and writes the state, where a chunk packs its tokens first.
constexpr int64_t kSteps = 2;

template <class A>
struct ForwardScratch {
  Chunk<A> chunk;
  A* states;                // of each head, [head_dim, value_ld]
  A *deltas, *out, *value;  // [kChunk, value_ld]

  ForwardScratch(const LinearAttentionParams& p, Arena& arena) : chunk(p, arena) {
    states = arena.take<A>(p.shared_heads * p.head_dim * chunk.value_ld);
    deltas = arena.take<A>(kChunk * chunk.value_ld);
    out = arena.take<A>(kChunk * chunk.value_ld);
    value = arena.take<A>(kChunk * chunk.value_ld);
  }
};

template <class A>
class LinearHeads {
 public:
  LinearHeads(const LinearAttentionParams& p, int64_t sequence, int64_t first_head, void* scratch)
      : p_(p),
        first_head_(first_head),
        of_(p, sequence, first_head),
        arena_(scratch),
        w_(p, arena_),
        c_(w_.chunk),
        ld_(c_.value_ld) {}

  void compute() {
    if (of_.count <= kSteps) {
      c_.load_keys(of_, 0, of_.count);
      return for_each_head([&](A*) { compute_steps(); });
    }
    for_each_head([&](A* state) { load_state(p_, p_.initial_state, of_.state(p_), state, ld_); });
    for (int64_t begin = 0; begin < of_.count; begin += kChunk) {
      c_.load_keys(of_, begin, smaller(kChunk, of_.count - begin));
      const bool finite = c_.has_finite_keys();
      if (finite) c_.compute_products(true, p_.beta);
      for_each_head([&](A* state) {
        c_.load_head(of_, begin);
        load_values(begin);
        if (finite && c_.has_finite_head() && all_finite(w_.value, ld_, c_.count, ld_))
          advance(begin, state);
        else
          for (int64_t t = 0; t < c_.count; ++t) step(t, state, ld_, state, ld_);
        store_out(begin);
      });
    }
    for_each_head([&](A* state) { store_state(p_, state, ld_, p_.state, of_.state(p_)); });
  }

 private:
  // f(state), with of_ at each head in turn.
  template <class F>
  void for_each_head(F&& f) {
    for (int64_t i = 0; i < p_.shared_heads; ++i) {
      of_.head = first_head_ + i;
      f(w_.states + i * p_.head_dim * ld_);
    }
  }
  void compute_steps() {
    A* const to = static_cast<A*>(p_.state) + of_.state(p_);
    const A* const from = p_.initial_state ? static_cast<const A*>(p_.initial_state) + of_.state(p_) : nullptr;
    if (of_.count == 0) return copy_state(from, to);
    c_.load_head(of_, 0);
    load_values(0);
    for (int64_t t = 0; t < of_.count; ++t) step(t, t == 0 ? from : to, p_.v_head_dim, to, p_.v_head_dim);
    store_out(0);
  }
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
  void advance(int64_t begin, A* state) {
    RowFetcher next = next_rows(p_, of_, begin, of_.head == first_head_ + p_.shared_heads - 1);
    c_.apply_decays();
    c_.apply_decays_to_products(true, p_.beta);
    const int64_t count = c_.count, dim = p_.head_dim, width = p_.v_head_dim;
    const A* deltas = w_.value;
    if (p_.beta) {
      multiply(count, width, dim, by_rows(c_.key_decayed, c_.key_ld), below(state, ld_), w_.deltas, ld_, false);
      for (int64_t t = 0; t < count; ++t)
        for_each_vector<A>(width, [&](int64_t v) {
          A* const delta = w_.deltas + t * ld_ + v;
          store<A>(delta, load<A>(w_.value + t * ld_ + v) - load<A>(delta));
        });
      c_.solve(w_.deltas, nullptr);
      deltas = w_.deltas;
    }
    multiply(count, width, dim, by_rows(c_.query_decayed, c_.key_ld), below(state, ld_), w_.out, ld_, false, {&next});
    c_.for_each_block([&](int64_t first, int64_t end) {
      multiply(end - first, width, end, by_rows(c_.probs + first * c_.score_ld, c_.score_ld), below(deltas, ld_),
               w_.out + first * ld_, ld_, true);
    });
    if (p_.log_decay) decay_state(c_.whole_decay, dim, width, state, ld_);
    multiply(dim, width, count, transposed(c_.key_left, c_.key_ld), below(deltas, ld_), state, ld_, true, {&next});
  }

  // Token t of the chunk, by the recurrence, for columns of the state whose sums stay in registers. from: null for
  // zeros.
  void step(int64_t t, const A* from, int64_t from_ld, A* to, int64_t to_ld) {
    int64_t v = 0;
    const auto columns = [&]<class V, int Count>(V, std::integral_constant<int, Count>) {
      constexpr int64_t kWidth = Count * sizeof(V) / sizeof(A);
      for (; v + kWidth <= p_.v_head_dim; v += kWidth)
        step_columns<V, Count>(t, v, from ? from + v : nullptr, from_ld, to + v, to_ld);
    };
    columns(Vec<A>{}, std::integral_constant<int, 8>());
    columns(Vec<A>{}, std::integral_constant<int, 4>());
    columns(Vec<A>{}, std::integral_constant<int, 1>());
    columns(A{}, std::integral_constant<int, 1>());  // a row of a tensor has no padding
  }

  // How far ahead the rows that are written are prefetched. The processor prefetches those that are read.
  static constexpr int64_t kWriteAhead = 1024 / sizeof(A);

  // Count vectors of each row, from column v on. The state is read for its products with k, if there are any, and then
  // once more, from a cache, to be written.
  template <class V, int Count>
  void step_columns(int64_t t, int64_t v, const A* from, int64_t from_ld, A* to, int64_t to_ld) {
    constexpr int64_t kNumbers = sizeof(V) / sizeof(A), kLineNumbers = kLine / sizeof(A);
    const A *q = c_.query + t * c_.key_ld, *k = c_.key + t * c_.key_ld, *value = w_.value + t * ld_ + v, one = 1;
    const A* const decay = !p_.log_decay ? &one : c_.decay + (p_.per_channel ? t * c_.key_ld : t);
    const int64_t decay_step = p_.log_decay && p_.per_channel;
    V by_key[Count]{}, delta[Count], out[Count]{};
    if (from && p_.beta)
      for (int64_t c = 0; c < p_.head_dim; ++c) {
        const A key = decay[c * decay_step] * k[c], *const row = from + c * from_ld;
#pragma GCC unroll 8
        for (int i = 0; i < Count; ++i) by_key[i] += key * load_bits<V>(row + i * kNumbers);
      }
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i) {
      delta[i] = load_bits<V>(value + i * kNumbers);
      if (p_.beta) delta[i] = c_.beta[t] * (delta[i] - by_key[i]);
    }
    for (int64_t c = 0; c < p_.head_dim; ++c) {
      const A kept = decay[c * decay_step];
      A* const row = to + c * to_ld;
      for (int64_t i = 0; i < Count * kNumbers; i += kLineNumbers) __builtin_prefetch(row + kWriteAhead + i, 1);
#pragma GCC unroll 8
      for (int i = 0; i < Count; ++i) {
        V x = k[c] * delta[i];
        if (from) x += kept * load_bits<V>(from + c * from_ld + i * kNumbers);
        out[i] += q[c] * x;
        __builtin_memcpy(row + i * kNumbers, &x, sizeof(V));
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i) __builtin_memcpy(w_.out + t * ld_ + v + i * kNumbers, &out[i], sizeof(V));
  }

  const LinearAttentionParams& p_;
  const int64_t first_head_;
  LinearSequence of_;
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

void linear_attention(const LinearAttentionParams& p, int64_t sequence, int64_t first_head, void* scratch) {
  with_accumulation(p.dtype, [&](auto a) { LinearHeads<decltype(a)>(p, sequence, first_head, scratch).compute(); });
}

}  // namespace attnpack::ATTNPACK_ISA
