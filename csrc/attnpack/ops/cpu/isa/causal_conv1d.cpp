#include <attnpack/ops/cpu/isa/math.h>
#include <attnpack/ops/cpu/isa/operands.h>
#include <attnpack/ops/cpu/isa/tile.h>

// The causal convolution of each channel by itself, one token after the other; lanes are channels.
namespace attnpack::ATTNPACK_ISA {
namespace {

constexpr int64_t kWidth = kConvChannels;  // of a row in scratch

// Some channels of a sequence: their taps, and the rows of inputs that a token reads.
template <class S, class A>
class ConvolvedChannels {
 public:
  ConvolvedChannels(const CausalConv1dParams& p, int64_t sequence, Range channels, Arena& arena)
      : p(p),
        sequence(sequence),
        first(p.ends ? p.ends[sequence] : sequence * p.length),
        count(p.ends      ? p.ends[sequence + 1] - first
              : p.kv_lens ? p.kv_lens[sequence]
                          : p.length),
        channels(channels),
        width(channels.end - channels.begin),
        taps_(arena.take<A>(p.taps * kWidth)),
        bias_(arena.take<A>(kWidth)),
        zeros_(arena.take<S>(kWidth)),
        rows_(arena.take<const S*>(p.taps)) {}

  void load_taps() {
    const A* const weight = static_cast<const A*>(p.weight) + channels.begin * p.taps;
    for (int64_t c = 0; c < width; ++c)
      for (int64_t k = 0; k < p.taps; ++k) taps_[k * kWidth + c] = weight[c * p.taps + k];
    for (int64_t k = 0; k < p.taps; ++k)
      for (int64_t c = width; c < kWidth; ++c) taps_[k * kWidth + c] = A(0);
    for (int64_t c = 0; c < kWidth; ++c) {
      bias_[c] = p.bias && c < width ? static_cast<const A*>(p.bias)[channels.begin + c] : A(0);
      zeros_[c] = S{};
    }
  }

  // The channels of input t of the sequence; those before 0 are the initial state.
  const S* input(int64_t t) const {
    if (t >= 0) {
      const int64_t row = p.ends ? (first + t) * p.x_row_stride : sequence * p.x_batch_stride + t * p.x_row_stride;
      return static_cast<const S*>(p.x) + row + channels.begin;
    }
    return p.initial_state ? state_row(static_cast<const S*>(p.initial_state), p.taps - 1 + t) : zeros_;
  }

  // The same channels of row j of a state, and of token t of a contiguous tensor [batch, length, channels].
  template <class T>
  T* state_row(T* state, int64_t j) const {
    return state + (sequence * (p.taps - 1) + j) * p.channels + channels.begin;
  }
  template <class T>
  T* token_row(T* base, int64_t t) const {
    return base + (first + t) * p.channels + channels.begin;
  }

  // f(c, some, sum) for the channels from c on, `some` of them: the sums of token t before the activation.
  template <class F>
  void each_sum(int64_t t, F&& f) {
    for (int64_t k = 0; k < p.taps; ++k) rows_[k] = input(t - (p.taps - 1) + k);
    if (p.taps == 4)
      sum_rows(std::integral_constant<int, 4>(), f);
    else
      sum_rows(p.taps, f);
  }

  // The numbers of channel c on that row k of the last token has.
  Vec<A> row(int64_t k, int64_t c, int64_t some) const { return load_upto(rows_[k] + c, some); }
  Vec<A> tap(int64_t k, int64_t c) const { return load<A>(taps_ + k * kWidth + c); }

  static Vec<A> load_upto(const S* from, int64_t some) {
    return some == kLanes<A> ? load<A>(from) : load_some<A>(from, some);
  }

  const CausalConv1dParams& p;
  const int64_t sequence, first, count;
  const Range channels;
  const int64_t width;

 private:
  template <class Taps, class F>
  void sum_rows(Taps taps, F&& f) {
    for (int64_t c = 0; c < width; c += kLanes<A>) {
      const int64_t some = smaller(kLanes<A>, width - c);
      Vec<A> sum = load<A>(bias_ + c);
      for (int64_t k = 0; k < taps; ++k) sum += tap(k, c) * row(k, c, some);
      f(c, some, sum);
    }
  }

  A *taps_, *bias_;  // [taps, kWidth], [kWidth]
  S* zeros_;
  const S** rows_;
};

template <class S, class A>
struct ConvScratch {
  ConvolvedChannels<S, A> of;
  A* line;

  ConvScratch(const CausalConv1dParams& p, int64_t sequence, Range channels, Arena& arena)
      : of(p, sequence, channels, arena), line(arena.take<A>(kWidth)) {}

  void compute(Range tokens) {
    of.load_taps();
    const auto& p = of.p;
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      of.each_sum(t, [&](int64_t c, int64_t, Vec<A> sum) { store<A>(line + c, p.silu ? sum * sigmoid(sum) : sum); });
      S* const out = of.token_row(static_cast<S*>(p.out), t);
      for (int64_t c = 0; c < of.width; ++c) store_one(out + c, line[c]);
    }
    if (tokens.end < of.count) return;
    for (int64_t j = 0; j < p.taps - 1; ++j)
      __builtin_memcpy(of.state_row(static_cast<S*>(p.state), j), of.input(of.count - (p.taps - 1) + j),
                       static_cast<size_t>(of.width) * sizeof(S));
  }
};

// Chunks of tokens, the last one first: an input has gradients from the tokens after it.
template <class S, class A>
struct ConvBackwardScratch {
  ConvolvedChannels<S, A> of;
  const CausalConv1dBackwardParams& bp;
  int64_t past;   // taps - 1
  A* grad_sums;   // [kConvTokens + past, kWidth]: the gradients of the sums of a chunk, and of the tokens after it
  A* chunk_taps;  // [taps + 1, kWidth]: the gradients of taps and bias from this chunk
  A* all_taps;    // the same from all chunks
  A* line;

  ConvBackwardScratch(const CausalConv1dBackwardParams& bp, int64_t sequence, Range channels, Arena& arena)
      : of(bp.forward, sequence, channels, arena), bp(bp), past(bp.forward.taps - 1) {
    grad_sums = arena.take<A>((kConvTokens + past) * kWidth);
    chunk_taps = arena.take<A>((past + 2) * kWidth);
    all_taps = arena.take<A>((past + 2) * kWidth);
    line = arena.take<A>(kWidth);
  }

  void compute() {
    of.load_taps();
    const int64_t rows = past + 2;
    clear_rows(all_taps, rows);
    const int64_t last = of.count > 0 ? (of.count - 1) / kConvTokens * kConvTokens : 0;
    clear_rows(grad_sums + (of.count - last) * kWidth, past);
    for (int64_t begin = last; begin >= 0; begin -= kConvTokens) {
      const int64_t end = smaller(begin + kConvTokens, of.count);
      clear_rows(chunk_taps, rows);
      for (int64_t t = begin; t < end; ++t) differentiate(t, grad_sums + (t - begin) * kWidth);
      for (int64_t i = 0; i < rows * kWidth; ++i) all_taps[i] += chunk_taps[i];
      for (int64_t t = begin; t < end; ++t) store_input(t, begin, of.token_row(static_cast<S*>(bp.grad_x), t));
      if (begin == 0 && bp.grad_initial_state)
        for (int64_t t = -past; t < 0; ++t)
          store_input(t, 0, of.state_row(static_cast<S*>(bp.grad_initial_state), past + t));
      // The first tokens of this chunk stand after the next one.
      __builtin_memmove(grad_sums + kConvTokens * kWidth, grad_sums, static_cast<size_t>(past * kWidth) * sizeof(A));
    }
    for (int64_t k = 0; k <= past; ++k) store_sums(bp.grad_weight, of.sequence * (past + 1) + k, k);
    store_sums(bp.grad_bias, of.sequence, past + 1);
  }

 private:
  static void clear_rows(A* rows, int64_t count) {
    for (int64_t i = 0; i < count * kWidth; ++i) rows[i] = A(0);
  }

  // The gradients of the sums of token t, and what they add to those of taps and bias.
  void differentiate(int64_t t, A* to) {
    const S* const grad_out = of.token_row(static_cast<const S*>(bp.grad_out), t);
    of.each_sum(t, [&](int64_t c, int64_t some, Vec<A> sum) {
      Vec<A> grad = of.load_upto(grad_out + c, some);
      if (of.p.silu) {
        const Vec<A> s = sigmoid(sum);
        grad *= s + sum * s * (A(1) - s);
      }
      store<A>(to + c, grad);
      for (int64_t k = 0; k <= past; ++k) add(chunk_taps + k * kWidth + c, grad * of.row(k, c, some));
      add(chunk_taps + (past + 1) * kWidth + c, grad);
    });
  }

  // The gradient of input t, from the tokens t to t + past whose sums read it, and from the state that holds it.
  void store_input(int64_t t, int64_t begin, S* to) {
    const int64_t state_index = t - (of.count - past);
    const S* const grad_state =
        bp.grad_state && state_index >= 0 ? of.state_row(static_cast<const S*>(bp.grad_state), state_index) : nullptr;
    for (int64_t c = 0; c < of.width; c += kLanes<A>) {
      Vec<A> sum{};
      if (grad_state) sum = of.load_upto(grad_state + c, smaller(kLanes<A>, of.width - c));
      for (int64_t k = 0; k <= past; ++k) {
        const int64_t reader = t + past - k - begin;
        if (reader >= 0) sum += of.tap(k, c) * load<A>(grad_sums + reader * kWidth + c);
      }
      store<A>(line + c, sum);
    }
    for (int64_t c = 0; c < of.width; ++c) store_one(to + c, line[c]);
  }

  static void add(A* to, Vec<A> x) { store<A>(to, load<A>(to) + x); }
  void store_sums(void* to, int64_t row, int64_t k) {
    A* const sums = static_cast<A*>(to) + row * of.p.channels + of.channels.begin;
    for (int64_t c = 0; c < of.width; ++c) sums[c] = all_taps[k * kWidth + c];
  }
};

// The sizes of the scratch do not depend on the lengths, and there may be no sequence to read one of.
CausalConv1dParams without_lengths(CausalConv1dParams p) {
  p.ends = p.kv_lens = nullptr;
  return p;
}

// f(storage, accumulation). Kernels with pairs are never asked (isa_table.h).
template <class F>
void with_types(DType dtype, F&& f) {
  if constexpr (!kPairProducts) dispatch(dtype, f);
}

}  // namespace

size_t causal_conv1d_scratch(const CausalConv1dParams& p) {
  Arena arena(nullptr);
  const CausalConv1dParams sizes = without_lengths(p);
  with_types(p.dtype, [&](auto s, auto a) { ConvScratch<decltype(s), decltype(a)>(sizes, 0, {0, 0}, arena); });
  return arena.used();
}

void causal_conv1d(const CausalConv1dParams& p, int64_t sequence, Range tokens, Range channels, void* scratch) {
  Arena arena(scratch);
  with_types(p.dtype, [&](auto s, auto a) {
    ConvScratch<decltype(s), decltype(a)>(p, sequence, channels, arena).compute(tokens);
  });
}

size_t causal_conv1d_backward_scratch(const CausalConv1dBackwardParams& bp) {
  Arena arena(nullptr);
  CausalConv1dBackwardParams sizes = bp;
  sizes.forward = without_lengths(bp.forward);
  with_types(bp.forward.dtype,
             [&](auto s, auto a) { ConvBackwardScratch<decltype(s), decltype(a)>(sizes, 0, {0, 0}, arena); });
  return arena.used();
}

void causal_conv1d_backward(const CausalConv1dBackwardParams& bp, int64_t sequence, Range channels, void* scratch) {
  Arena arena(scratch);
  with_types(bp.forward.dtype, [&](auto s, auto a) {
    ConvBackwardScratch<decltype(s), decltype(a)>(bp, sequence, channels, arena).compute();
  });
}

}  // namespace attnpack::ATTNPACK_ISA
