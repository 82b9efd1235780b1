#include <attnpack/ops/cpu/isa/dot.h>
#include <attnpack/ops/cpu/isa/tile.h>

// A linear layer for few rows: the weight is streamed once, row by row, past all rows of the input.
namespace attnpack::ATTNPACK_ISA {
namespace {

constexpr int64_t kBlock = 64;              // most outputs at a time
constexpr int64_t kBlockBytes = 128 << 10;  // of their weights, which stay in the L2 cache for all rows
constexpr int64_t kAhead = 512;             // bytes of a long weight row that are prefetched ahead
constexpr int64_t kLongRows =
    16384;  // bytes of the rows read side by side, from where the next ones would come too early

// Elements ahead of its use that a weight is prefetched: the rows after those that one row of input meets side by side,
// where they are short.
template <class S>
int64_t ahead(const LinearParams& p) {
  const int64_t next = kBeside<1> * p.weight_stride, size = sizeof(S);
  return next * size <= kLongRows ? next : kAhead / size;
}

template <class S, class A, int Rows>
void multiply(const LinearParams& p, const A* x, int64_t width, int64_t first, int64_t begin, int64_t count) {
  A s[Rows * kBlock];
  dot_products<S, A, Rows>(x + first * width, width, static_cast<const S*>(p.weight) + begin * p.weight_stride,
                           p.weight_stride, count, p.inputs, ahead<S>(p), s, kBlock);
  for (int64_t r = 0; r < Rows; ++r)
    for (int64_t j = 0; j < count; ++j) {
      const A bias = p.bias ? static_cast<A>(load_one(static_cast<const S*>(p.bias) + begin + j)) : A(0);
      store_one(static_cast<S*>(p.out) + (first + r) * p.outputs + begin + j, s[r * kBlock + j] + bias);
    }
}

template <class S, class A>
void run(const LinearParams& p, Range outputs, void* scratch) {
  const int64_t width = padded<A>(p.inputs);
  A* x = Arena(scratch).take<A>(p.rows * width);
  pack<A>(static_cast<const S*>(p.input), p.inputs, p.rows, p.inputs, x, width);
  const int64_t fit = kBlockBytes / (p.inputs * static_cast<int64_t>(sizeof(S))) / kBeside<1> * kBeside<1>;
  const int64_t block = fit < kBeside<1> ? kBeside<1> : smaller(fit, kBlock);
  for (int64_t begin = outputs.begin; begin < outputs.end; begin += block) {
    const int64_t count = smaller(block, outputs.end - begin);
    int64_t r = 0;
    for (; r + kRowsAtOnce <= p.rows; r += kRowsAtOnce) multiply<S, A, kRowsAtOnce>(p, x, width, r, begin, count);
    for (; r < p.rows; ++r) multiply<S, A, 1>(p, x, width, r, begin, count);
  }
}

}  // namespace

size_t linear_scratch(const LinearParams& p) {
  return static_cast<size_t>(p.rows * padded<float>(p.inputs)) * sizeof(float) + 64;
}

void linear_rows(const LinearParams& p, Range outputs, void* scratch) {
  switch (p.dtype) {
    case DType::kFloat32:
      return run<float, float>(p, outputs, scratch);
    case DType::kBFloat16:
      return run<BFloat16, float>(p, outputs, scratch);
    default:
      return run<Float16, float>(p, outputs, scratch);
  }
}

}  // namespace attnpack::ATTNPACK_ISA
