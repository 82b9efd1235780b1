#include <attnpack/ops/cpu/isa/operands.h>

// RMSNorm, one row at a time: the sum of its squares, then one pass that scales the row. Perhaps something is added
// first.
namespace attnpack::ATTNPACK_ISA {
namespace {

template <class S, class A>
void normalise_row(const S* x, const S* weight, int64_t dim, A eps, S* out) {
  const int64_t whole = dim / kLanes<A> * kLanes<A>;
  Vec<A> squares{};
  for (int64_t d = 0; d < whole; d += kLanes<A>) squares += load<A>(x + d) * load<A>(x + d);
  const Vec<A> rest = load_some<A>(x + whole, dim - whole);
  const A mean = fold_lanes<A>(squares + rest * rest, Add()) / static_cast<A>(dim);
  const A factor = A(1) / static_cast<A>(__builtin_sqrt(static_cast<double>(mean + eps)));
  for (int64_t d = 0; d < dim; ++d)
    store_one(out + d, static_cast<A>(load_one(x + d)) * factor * static_cast<A>(load_one(weight + d)));
}

template <class S>
void add_row(const S* x, const S* added, int64_t dim, S* sum) {
  for (int64_t d = 0; d < dim; ++d) store_one(sum + d, load_one(x + d) + load_one(added + d));
}

}  // namespace

void rms_norm_rows(const RmsNormParams& p, Range rows) {
  dispatch_pairs(p.dtype, [&](auto storage, auto accumulation) {
    using S = decltype(storage);
    using A = decltype(accumulation);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const int64_t at = r * p.dim;
      const S* x = static_cast<const S*>(p.x) + at;
      if (p.added) {
        S* const sum = static_cast<S*>(p.sum) + at;
        add_row(x, static_cast<const S*>(p.added) + at, p.dim, sum);
        x = sum;
      }
      normalise_row<S, A>(x, static_cast<const S*>(p.weight), p.dim, static_cast<A>(p.eps),
                          static_cast<S*>(p.out) + at);
    }
  });
}

}  // namespace attnpack::ATTNPACK_ISA
