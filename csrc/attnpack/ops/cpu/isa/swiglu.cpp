#include <attnpack/ops/cpu/isa/operands.h>

// silu(gate) * up, number by number.
namespace attnpack::ATTNPACK_ISA {
namespace {

template <class A>
Vec<A> product(Vec<A> gate, Vec<A> up) {
  return gate * sigmoid(gate) * up;
}

template <class S, class A>
void multiply(const S* gate, const S* up, int64_t count, S* out) {
  const int64_t whole = count / kLanes<A> * kLanes<A>;
  for (int64_t i = 0; i < whole; i += kLanes<A>) {
    A y[kLanes<A>];  // stored number by number, which the compiler turns into vectors of S
    store<A>(y, product<A>(load<A>(gate + i), load<A>(up + i)));
    for (int l = 0; l < kLanes<A>; ++l) store_one(out + i + l, y[l]);
  }
  const int64_t rest = count - whole;
  const Vec<A> y = product<A>(load_some<A>(gate + whole, rest), load_some<A>(up + whole, rest));
  for (int64_t l = 0; l < rest; ++l) store_one(out + whole + l, y[l]);
}

}  // namespace

void swiglu(const SwigluParams& p, Range numbers) {
  dispatch_pairs(p.dtype, [&](auto storage, auto accumulation) {
    using S = decltype(storage);
    multiply<S, decltype(accumulation)>(static_cast<const S*>(p.gate) + numbers.begin,
                                        static_cast<const S*>(p.up) + numbers.begin, numbers.end - numbers.begin,
                                        static_cast<S*>(p.out) + numbers.begin);
  });
}

}  // namespace attnpack::ATTNPACK_ISA
