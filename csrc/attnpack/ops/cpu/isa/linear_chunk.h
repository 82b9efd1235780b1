#pragma once

#include <attnpack/ops/cpu/isa/tile.h>

// Linear attention and the delta rule in chunks of tokens (Yang et al. 2024, arXiv 2406.06484 and 2412.06464; decay per
// channel: Kimi Linear 2025). With a_t = exp(log_decay_t), and S the state before the chunk:
//   A[t, s] = sum_c k_t[c] k_s[c] prod_{s < r <= t} a_r[c]   for s < t: how far token s overlaps with token t
//   P[t, s] = sum_c q_t[c] k_s[c] prod_{s < r <= t} a_r[c]   for s <= t
//   e_t = v_t - S^T (k_t prod_{r <= t} a_r) - sum_s A[t, s] d_s,  d_t = beta_t e_t   (without beta: d_t = v_t)
//   o_t = S^T (q_t prod_{r <= t} a_r) + sum_s P[t, s] d_s
//   S <- diag(prod_r a_r) S + sum_s (k_s prod_{s < r} a_r) d_s^T
// Decays are only ever multiplied. There is no quotient and no difference of their logarithms, so a decay that
// underflows is an exact 0. q is scaled when it is loaded.
namespace attnpack::ATTNPACK_ISA {

constexpr int64_t kChunk = 64;  // tokens of a chunk
constexpr int64_t kBlock = 16;  // tokens of a block: whole vectors in every instruction set

// The row stride of a matrix that is an operand and a result of products: whole panels, and no power of two.
template <class A>
constexpr int64_t row_stride(int64_t columns) {
  return padded<A>(columns) + kLanes<A>;
}

// Prefetches rows of tensors into the L2 cache, one at each call: products call it while they run.
class RowFetcher {
 public:
  void add(const void* base, const Strides& strides, int64_t element, int64_t b, int64_t head, int64_t first,
           int64_t count, int64_t columns) {
    const char* const from = static_cast<const char*>(base);
    lists_[size_++] = {from + (b * strides.batch + head * strides.head + first * strides.row) * element,
                       strides.row * element, count, columns * element};
  }
  [[gnu::always_inline]] void fetch_one() {
    if (next_ == size_) return;
    List& list = lists_[next_];
    if (list.count-- <= 0) return void(++next_);
    for (int64_t i = 0; i < list.bytes; i += kLine) fetch(list.row + i);
    list.row += list.stride;
  }

 private:
  struct List {
    const char* row;
    int64_t stride, count, bytes;
  };
  List lists_[4];
  int size_ = 0, next_ = 0;
};
struct FetchRows {
  RowFetcher* rows = nullptr;
  void operator()() const {
    if (rows) rows->fetch_one();
  }
};

// C (+)= A B. Where 2 rows would be left after whole register tiles of 6, two tiles of 4 take the last 8.
template <class A>
void multiply(int64_t rows, int64_t columns, int64_t depth, Operand<A> left, const Panels<A>& right, A* to, int64_t ld,
              bool accumulate, FetchRows meanwhile = {}) {
  const auto some = [&](int64_t begin, int64_t end) {
    gemm<A, A, SideWork::kNothing>(end - begin, columns, depth, {left.data + begin * left.row, left.row, left.column},
                                   right, to + begin * ld, ld, accumulate, kDepth, meanwhile);
  };
  const int64_t last = kTileRows == 6 && rows > kTileRows && rows % kTileRows == 2 ? 8 : 0;
  some(0, rows - last);
  if (last) some(rows - last, rows);
}

template <class A>
Operand<A> by_rows(const A* data, int64_t ld) {
  return {data, ld, 1};
}
template <class A>
Operand<A> transposed(const A* data, int64_t ld) {
  return {data, 1, ld};
}
// The rows of a matrix as a right-hand side.
template <class A>
Panels<A> below(const A* data, int64_t ld) {
  return {data, ld, kPanel<A>};
}
// A right-hand side of `rows` rows that transpose_panels wrote.
template <class A>
Panels<A> across(const A* data, int64_t rows) {
  return {data, kPanel<A>, kPanel<A> * rows};
}

// f(c) for each vector of a row of `columns` numbers in scratch, where rows are padded.
template <class A, class F>
inline void for_each_vector(int64_t columns, F&& f) {
  for (int64_t c = 0; c < columns; c += kLanes<A>) f(c);
}

// The sequence and value head of a unit of work, and its tokens: rows [first, first + count) of batch row b.
struct LinearSequence {
  int64_t number, head, key_head, b, first, count;

  LinearSequence(const LinearAttentionParams& p, int64_t number, int64_t head)
      : number(number),
        head(head),
        key_head(head / (p.num_heads / p.num_key_heads)),
        b(p.ends ? 0 : number),
        first(p.ends ? p.ends[number] : 0),
        count(p.ends      ? p.ends[number + 1] - first
              : p.kv_lens ? p.kv_lens[number]
                          : p.length) {}

  // The place of the head's state in a tensor [sequences, num_heads, head_dim, v_head_dim].
  int64_t state(const LinearAttentionParams& p) const {
    return (number * p.num_heads + head) * p.head_dim * p.v_head_dim;
  }
};

// The rows of value, and maybe those of query and key, that follow a chunk which begins at token `begin`.
inline RowFetcher next_rows(const LinearAttentionParams& p, const LinearSequence& of, int64_t begin, bool with_keys) {
  RowFetcher rows;
  const int64_t first = of.first + begin + kChunk, count = smaller(of.count - begin - kChunk, kChunk);
  const int64_t element = bytes_of(p.dtype);
  if (with_keys) {
    rows.add(p.query, p.query_strides, element, of.b, of.key_head, first, count, p.head_dim);
    rows.add(p.key, p.key_strides, element, of.b, of.key_head, first, count, p.head_dim);
  }
  rows.add(p.value, p.value_strides, element, of.b, of.head, first, count, p.v_head_dim);
  return rows;
}

inline int64_t most_tokens(const LinearAttentionParams& p) {
  if (!p.ends) return p.length;
  int64_t most = 0;
  for (int64_t n = 0; n < p.sequences; ++n) most = larger(most, p.ends[n + 1] - p.ends[n]);
  return most;
}

// Calls f with a value of the accumulation type. Pairs of bf16 are for no product here: isa_table.h gives these calls
// to plain AVX-512.
template <class F>
inline void with_accumulation(DType dtype, F&& f) {
  if constexpr (!kPairProducts) dtype == DType::kFloat64 ? f(double{}) : f(float{});
}

// Calls f with a value of the storage type. Only loads and stores know it: the rest is compiled once per accumulation
// type.
template <class A, class F>
inline void with_storage(DType dtype, F&& f) {
  if constexpr (sizeof(A) == sizeof(double))
    f(double{});
  else if (dtype == DType::kFloat32)
    f(float{});
  else if (dtype == DType::kBFloat16)
    f(BFloat16{});
  else
    f(Float16{});
}

template <class A>
void load_rows(DType dtype, const void* base, const Strides& strides, int64_t b, int64_t head, int64_t first,
               int64_t count, int64_t columns, A* to, int64_t ld) {
  with_storage<A>(dtype, [&](auto storage) {
    for (int64_t r = 0; r < count; ++r)
      pack(at<decltype(storage)>(base, strides, b, head, first + r), columns, to + r * ld, ld);
  });
}

template <class A>
void store_rows(DType dtype, const A* from, int64_t ld, int64_t count, int64_t columns, void* base,
                const Strides& strides, int64_t b, int64_t head, int64_t first) {
  with_storage<A>(dtype, [&](auto storage) {
    for (int64_t r = 0; r < count; ++r) {
      auto* to = at<decltype(storage)>(base, strides, b, head, first + r);
      for (int64_t c = 0; c < columns; ++c) store_one(to + c, from[r * ld + c]);
    }
  });
}

// A chunk of a sequence: its tokens, their decays, and the products among them.
template <class A>
class Chunk {
 public:
  const LinearAttentionParams& p;
  const int64_t key_ld, value_ld, score_ld;
  int64_t count = 0;
  A *query, *key;                  // [count, key_ld]
  A *query_decayed, *key_decayed;  // times the decays from the chunk's start to the token
  A* key_left;                     // times the decays from the token to the chunk's end
  A* decay;                        // per channel [count, key_ld], or [count]
  A* whole_decay;                  // of the whole chunk, [key_ld]
  A* beta;                         // [count]
  A *probs, *overlaps;             // P and -A, [count, score_ld]; 0 above the diagonal
  // One decay per head: q_t k_s and k_t k_s, which all value heads of a key head share.
  A *query_products, *key_products;
  A* spans;                    // one decay per head: prod_{s < r <= t} a_r, [count, score_ld]
  A *from_start, *to_end;      // per channel: the decays from the start of the token's block to the
                               // token, and from the token to the start of the present block
  A *block_query, *block_key;  // per channel: a block's rows times from_start, [kBlock, key_ld]
  A* earlier_keys;             // per channel: the keys before the block times to_end
  A* panels;                   // keys, transposed

  Chunk(const LinearAttentionParams& params, Arena& arena)
      : p(params),
        key_ld(row_stride<A>(p.head_dim)),
        value_ld(row_stride<A>(p.v_head_dim)),
        score_ld(row_stride<A>(kChunk)) {
    const int64_t keys = kChunk * key_ld, scores = kChunk * score_ld;
    query = arena.take<A>(keys);
    key = arena.take<A>(keys);
    query_decayed = p.log_decay ? arena.take<A>(keys) : query;
    key_decayed = p.log_decay ? arena.take<A>(keys) : key;
    key_left = p.log_decay ? arena.take<A>(keys) : key;
    decay = arena.take<A>(p.per_channel ? keys : kChunk);
    whole_decay = arena.take<A>(key_ld);
    beta = arena.take<A>(kChunk);
    probs = arena.take<A>(scores);
    overlaps = arena.take<A>(scores);
    const bool share = p.shared_heads > 1 && !p.per_channel;
    query_products = share ? arena.take<A>(scores) : probs;
    key_products = share ? arena.take<A>(scores) : overlaps;
    spans = arena.take<A>(scores);
    if (p.per_channel) {
      from_start = arena.take<A>(keys);
      to_end = arena.take<A>(keys);
      block_query = arena.take<A>(kBlock * key_ld);
      block_key = arena.take<A>(kBlock * key_ld);
      earlier_keys = arena.take<A>(keys);
    }
    panels = arena.take<A>(padded<A>(kChunk) * p.head_dim);
  }

  void load_tokens(const LinearSequence& of, int64_t begin, int64_t tokens) {
    load_keys(of, begin, tokens);
    load_head(of, begin);
  }
  // Queries and keys, which all value heads of a key head share.
  void load_keys(const LinearSequence& of, int64_t begin, int64_t tokens) {
    count = tokens;
    const int64_t first = of.first + begin;
    load_rows(p.dtype, p.query, p.query_strides, of.b, of.key_head, first, count, p.head_dim, query, key_ld);
    load_rows(p.dtype, p.key, p.key_strides, of.b, of.key_head, first, count, p.head_dim, key, key_ld);
    const A scale = static_cast<A>(p.scale);
    for (int64_t t = 0; t < count; ++t)
      each_channel([&](int64_t c) { store<A>(query + t * key_ld + c, load_at(query, t, c) * scale); });
  }
  // The decays and beta of the value head.
  void load_head(const LinearSequence& of, int64_t begin) {
    const int64_t first = of.first + begin;
    if (p.beta)
      for (int64_t t = 0; t < count; ++t) beta[t] = *at<A>(p.beta, p.beta_strides, of.b, of.head, first + t);
    if (p.log_decay) load_decays(of, first);
  }

  // Whether all numbers are finite. A NaN or Inf would reach tokens before it, by products with 0.
  bool has_finite_keys() const {
    return all_finite(query, key_ld, count, key_ld) && all_finite(key, key_ld, count, key_ld);
  }
  bool has_finite_head() const {
    bool finite = !p.per_channel || all_finite(decay, key_ld, count, key_ld);
    for (int64_t t = 0; t < count; ++t)
      finite = finite && (!p.beta || beta[t] * 0 == 0) && (!p.log_decay || p.per_channel || decay[t] * 0 == 0);
    return finite;
  }

  // query_decayed, key_decayed, key_left and whole_decay.
  void apply_decays() {
    if (!p.log_decay) return each_channel([&](int64_t c) { store<A>(whole_decay + c, broadcast(A(1))); });
    if (!p.per_channel) return apply_decays_per_head();
    each_channel([&](int64_t c) {
      Vec<A> product = broadcast(A(1));
      for (int64_t t = 0; t < count; ++t) {
        product *= decay_at(t, c);
        store<A>(query_decayed + t * key_ld + c, load_at(query, t, c) * product);
        store<A>(key_decayed + t * key_ld + c, load_at(key, t, c) * product);
      }
      store<A>(whole_decay + c, product);
      product = broadcast(A(1));
      for (int64_t t = count - 1; t >= 0; --t) {
        store<A>(key_left + t * key_ld + c, load_at(key, t, c) * product);
        product *= decay_at(t, c);
      }
    });
  }

  // probs and overlaps; either may be left out.
  void compute_scores(bool with_probs, bool with_overlaps) {
    compute_products(with_probs, with_overlaps);
    apply_decays_to_products(with_probs, with_overlaps);
  }
  // Their parts that no decay of a head changes.
  void compute_products(bool with_probs, bool with_overlaps) {
    if (p.per_channel) return;
    pack_transposed(StridedRows<A>{key, key_ld}, count, p.head_dim, panels);
    for_each_block([&](int64_t begin, int64_t end) {
      const auto products = [&](const A* rows, A* to) {
        multiply(end - begin, end, p.head_dim, by_rows(rows + begin * key_ld, key_ld), across(panels, p.head_dim),
                 to + begin * score_ld, score_ld, false);
      };
      if (with_probs) products(query, query_products);
      if (with_overlaps) products(key, key_products);
    });
  }
  void apply_decays_to_products(bool with_probs, bool with_overlaps) {
    if (p.per_channel) return scores_per_channel(with_probs, with_overlaps);
    compute_spans();
    for_each_block([&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        for_each_vector<A>(end, [&](int64_t s) {
          const int64_t at = t * score_ld + s;
          const Vec<A> kept = load<A>(spans + at), none{};
          if (with_probs) store<A>(probs + at, kept == 0 ? none : load<A>(query_products + at) * kept);
          if (with_overlaps) store<A>(overlaps + at, kept == 0 ? none : load<A>(key_products + at) * -kept);
        });
    });
  }

  // Turns w = v - S^T k_decayed into d, and keeps e where it is not null; both [count, value_ld].
  void solve(A* w, A* e) const {
    for_each_block([&](int64_t begin, int64_t end) {
      if (begin > 0)
        multiply(end - begin, p.v_head_dim, begin, by_rows(overlaps + begin * score_ld, score_ld), below(w, value_ld),
                 w + begin * value_ld, value_ld, true);
      columns_in_groups([&]<int Count>(int64_t c) {
        for (int64_t t = begin; t < end; ++t) {
          Vec<A> sum[Count];
          load_group(w + t * value_ld + c, sum);
          for (int64_t s = begin; s < t; ++s) add_group(overlaps[t * score_ld + s], w + s * value_ld + c, sum);
          if (e) store_group(A(1), sum, e + t * value_ld + c);
          store_group(beta[t], sum, w + t * value_ld + c);
        }
      });
    });
  }

  // The reverse for the gradients. w is minus the gradient of d by all but the overlaps, and becomes minus the whole
  // one, -x. minus_e gets minus the gradient of e. -x_t = w_t + sum_{s > t} A[s, t] beta_s x_s.
  void solve_transposed(A* w, A* minus_e) const {
    for (int64_t begin = (count - 1) / kBlock * kBlock; begin >= 0; begin -= kBlock) {
      const int64_t end = smaller(begin + kBlock, count);
      if (end < count)
        multiply(end - begin, p.v_head_dim, count - end, transposed(overlaps + end * score_ld + begin, score_ld),
                 below(minus_e + end * value_ld, value_ld), w + begin * value_ld, value_ld, true);
      columns_in_groups([&]<int Count>(int64_t c) {
        for (int64_t t = end - 1; t >= begin; --t) {
          Vec<A> sum[Count];
          load_group(w + t * value_ld + c, sum);
          for (int64_t s = t + 1; s < end; ++s) add_group(overlaps[s * score_ld + t], minus_e + s * value_ld + c, sum);
          store_group(A(1), sum, w + t * value_ld + c);
          store_group(beta[t], sum, minus_e + t * value_ld + c);
        }
      });
    }
  }

  template <class F>
  void for_each_block(F&& f) const {
    for (int64_t begin = 0; begin < count; begin += kBlock) f(begin, smaller(begin + kBlock, count));
  }
  template <class F>
  void each_channel(F&& f) const {
    for_each_vector<A>(p.head_dim, f);
  }
  Vec<A> load_at(const A* rows, int64_t t, int64_t c) const { return load<A>(rows + t * key_ld + c); }
  Vec<A> decay_at(int64_t t, int64_t c) const {
    if (!p.log_decay) return broadcast(A(1));
    return p.per_channel ? load_at(decay, t, c) : broadcast(decay[t]);
  }

  // Per channel, for the block that begins at `begin`: from_start and the block's rows, to_end and earlier_keys.
  void begin_block(int64_t begin, int64_t end) {
    each_channel([&](int64_t c) {
      Vec<A> product = broadcast(A(1));
      for (int64_t t = begin; t < end; ++t) {
        product *= decay_at(t, c);
        store<A>(from_start + t * key_ld + c, product);
        store<A>(block_query + (t - begin) * key_ld + c, load_at(query, t, c) * product);
        store<A>(block_key + (t - begin) * key_ld + c, load_at(key, t, c) * product);
      }
      if (begin == 0) return;
      product = broadcast(A(1));
      for (int64_t s = begin - 1; s >= 0; --s) {
        // Within the last block the decays are multiplied one by one, before it as a whole.
        const Vec<A> span = s >= begin - kBlock ? product : load_at(to_end, s, c) * product;
        store<A>(to_end + s * key_ld + c, span);
        store<A>(earlier_keys + s * key_ld + c, load_at(key, s, c) * span);
        if (s >= begin - kBlock) product *= decay_at(s, c);
      }
    });
  }

 private:
  void apply_decays_per_head() {
    A product = 1;
    for (int64_t t = 0; t < count; ++t) {
      product *= decay[t];
      each_channel([&](int64_t c) {
        store<A>(query_decayed + t * key_ld + c, product * load_at(query, t, c));
        store<A>(key_decayed + t * key_ld + c, product * load_at(key, t, c));
      });
    }
    each_channel([&](int64_t c) { store<A>(whole_decay + c, broadcast(product)); });
    product = 1;
    for (int64_t t = count - 1; t >= 0; --t) {
      each_channel([&](int64_t c) { store<A>(key_left + t * key_ld + c, product * load_at(key, t, c)); });
      product *= decay[t];
    }
  }

  static constexpr int kGroup = 4;  // vectors of a row that are summed up together

  template <int Count>
  static void load_group(const A* from, Vec<A> (&to)[Count]) {
#pragma GCC unroll 4
    for (int i = 0; i < Count; ++i) to[i] = load<A>(from + i * kLanes<A>);
  }
  template <int Count>
  static void add_group(A factor, const A* from, Vec<A> (&to)[Count]) {
#pragma GCC unroll 4
    for (int i = 0; i < Count; ++i) to[i] += factor * load<A>(from + i * kLanes<A>);
  }
  template <int Count>
  static void store_group(A factor, const Vec<A> (&from)[Count], A* to) {
#pragma GCC unroll 4
    for (int i = 0; i < Count; ++i) store<A>(to + i * kLanes<A>, factor * from[i]);
  }
  template <class F>
  void columns_in_groups(F&& f) const {
    int64_t c = 0;
    for (; c + kGroup * kLanes<A> <= padded<A>(p.v_head_dim); c += kGroup * kLanes<A>) f.template operator()<kGroup>(c);
    for (; c < p.v_head_dim; c += kLanes<A>) f.template operator()<1>(c);
  }

  void load_decays(const LinearSequence& of, int64_t first) {
    bool positive = false;
    if (p.per_channel) {
      for (int64_t t = 0; t < count; ++t) {
        A* const row = decay + t * key_ld;
        pack(at<A>(p.log_decay, p.log_decay_strides, of.b, of.head, first + t), p.head_dim, row, key_ld);
        for (int64_t c = 0; c < p.head_dim; ++c) positive |= row[c] > 0;
        each_channel([&](int64_t c) { store<A>(row + c, exp(load<A>(row + c))); });
      }
    } else {
      for (int64_t t = 0; t < whole_vectors<A>(count); ++t)
        decay[t] = t < count ? *at<A>(p.log_decay, p.log_decay_strides, of.b, of.head, first + t) : A(0);
      for (int64_t t = 0; t < count; ++t) positive |= decay[t] > 0;
      for_each_vector<A>(count, [&](int64_t t) { store<A>(decay + t, exp(load<A>(decay + t))); });
    }
    if (positive && p.positive_decays) __atomic_store_n(p.positive_decays, 1, __ATOMIC_RELAXED);
  }

  void compute_spans() {
    A* const none = spans + (kChunk - 1) * score_ld;  // the last row is written last
    for_each_vector<A>(score_ld, [&](int64_t s) { store<A>(none + s, Vec<A>{}); });
    for (int64_t t = 0; t < count; ++t) {
      const A* const before = t > 0 ? spans + (t - 1) * score_ld : none;
      const A factor = p.log_decay ? decay[t] : A(1);
      for_each_vector<A>(score_ld,
                         [&](int64_t s) { store<A>(spans + t * score_ld + s, factor * load<A>(before + s)); });
      spans[t * score_ld + t] = 1;
    }
  }

  void scores_per_channel(bool with_probs, bool with_overlaps) {
    for_each_block([&](int64_t begin, int64_t end) {
      begin_block(begin, end);
      if (begin > 0) {
        pack_transposed(StridedRows<A>{earlier_keys, key_ld}, begin, p.head_dim, panels);
        const auto products = [&](const A* rows, A* to) {
          multiply(end - begin, begin, p.head_dim, by_rows(rows, key_ld), across(panels, p.head_dim),
                   to + begin * score_ld, score_ld, false);
        };
        if (with_probs) products(block_query, probs);
        if (with_overlaps) {
          products(block_key, overlaps);
          for (int64_t t = begin; t < end; ++t)
            for (int64_t s = 0; s < begin; ++s) overlaps[t * score_ld + s] = -overlaps[t * score_ld + s];
        }
      }
      for (int64_t t = begin; t < end; ++t) scores_within_block(t, begin);
    });
  }

  // Row t of probs and overlaps, for the tokens of its own block.
  void scores_within_block(int64_t t, int64_t begin) {
    A *const prob = probs + t * score_ld, *const overlap = overlaps + t * score_ld;
    for (int64_t s = t; s < begin + kBlock; ++s) prob[s] = overlap[s] = 0;
    A* const span = block_key;  // its rows are not needed any more
    each_channel([&](int64_t c) { store<A>(span + c, broadcast(A(1))); });
    for (int64_t s = t; s >= begin; --s) {
      Vec<A> by_query{}, by_key{};
      each_channel([&](int64_t c) {
        const Vec<A> product = load<A>(span + c), kept = load_at(key, s, c) * product;
        by_query += load_at(query, t, c) * kept;
        by_key += load_at(key, t, c) * kept;
        store<A>(span + c, product * decay_at(s, c));
      });
      prob[s] = fold_lanes<A>(by_query, Add());
      if (s < t) overlap[s] = -fold_lanes<A>(by_key, Add());
    }
  }
};

// S <- diag(decay) S, by rows.
template <class A>
inline void decay_state(const A* decay, int64_t head_dim, int64_t v_head_dim, A* state, int64_t ld) {
  for (int64_t c = 0; c < head_dim; ++c)
    for_each_vector<A>(v_head_dim,
                       [&](int64_t v) { store<A>(state + c * ld + v, decay[c] * load<A>(state + c * ld + v)); });
}

// Reads or clears a state [head_dim, v_head_dim] in rows of ld numbers.
template <class A>
inline void load_state(const LinearAttentionParams& p, const void* from, int64_t place, A* state, int64_t ld) {
  for (int64_t c = 0; c < p.head_dim; ++c) {
    A* const row = state + c * ld;
    if (from)
      pack(static_cast<const A*>(from) + place + c * p.v_head_dim, p.v_head_dim, row, ld);
    else
      for (int64_t v = 0; v < ld; ++v) row[v] = 0;
  }
}
template <class A>
inline void store_state(const LinearAttentionParams& p, const A* state, int64_t ld, void* to, int64_t place) {
  for (int64_t c = 0; c < p.head_dim; ++c)
    __builtin_memcpy(static_cast<A*>(to) + place + c * p.v_head_dim, state + c * ld, p.v_head_dim * sizeof(A));
}

}  // namespace attnpack::ATTNPACK_ISA
