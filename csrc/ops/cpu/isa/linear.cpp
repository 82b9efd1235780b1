#include <attnpack/ops/cpu/isa/dot.h>

// A linear layer for few rows: the weight is streamed once, row by row, past all rows of the input.
namespace attnpack::ATTNPACK_ISA {
namespace {

constexpr int64_t kTogether = 4;            // blocks are a multiple of it
constexpr int64_t kBlock = 64;              // most outputs at a time
constexpr int64_t kBlockBytes = 128 << 10;  // of their weights, which stay in the L2 cache while more rows read them
constexpr Stream kWeights{5 << 10}, kWeightsAgain{8 << 10, true};  // few rows read them once, more of them again

// A function of its own: inlined beside those of more rows, the loop of one row took 6% longer (GCC 12).
template <class Operands, int Rows, Stream stream, class S>
[[gnu::noinline]] void multiply(const LinearParams& p, const typename Operands::Element* x, int64_t width,
                                int64_t first, int64_t begin, int64_t count) {
  float s[Rows * kBlock];
  dot_products<Operands, Rows, stream>(x + first * width, width,
                                       static_cast<const S*>(p.weight) + begin * p.weight_stride, p.weight_stride,
                                       count, p.inputs, s, kBlock);
  for (int64_t r = 0; r < Rows; ++r)
    for (int64_t j = 0; j < count; ++j) {
      const float bias = p.bias ? load_one(static_cast<const S*>(p.bias) + begin + j) : 0.0f;
      store_one(static_cast<S*>(p.out) + (first + r) * p.outputs + begin + j, s[r * kBlock + j] + bias);
    }
}

// Up to kRowsAtOnce of the rows that begin with `first`.
template <class Operands, Stream stream, class S>
void multiply_some(const LinearParams& p, const typename Operands::Element* x, int64_t width, int64_t first,
                   int64_t begin, int64_t count) {
  static_assert(kRowsAtOnce == 4);
  switch (p.rows - first) {
    case 1:
      return multiply<Operands, 1, stream, S>(p, x, width, first, begin, count);
    case 2:
      return multiply<Operands, 2, stream, S>(p, x, width, first, begin, count);
    case 3:
      return multiply<Operands, 3, stream, S>(p, x, width, first, begin, count);
    default:
      return multiply<Operands, 4, stream, S>(p, x, width, first, begin, count);
  }
}

template <class S>
void run(const LinearParams& p, Range outputs, void* scratch) {
  using Operands = OperandsOf<S, float>;
  using E = typename Operands::Element;
  const int64_t width = padded<E>(steps<Operands>(p.inputs));
  Arena arena(scratch);
  int64_t* packed = arena.take<int64_t>(1);  // first in scratch: its owner clears it
  E* x = arena.take<E>(p.rows * width);
  for (int64_t r = 0; r < p.rows && !*packed; ++r)
    Operands::pack_row(static_cast<const S*>(p.input) + r * p.inputs, p.inputs, x + r * width, width);
  *packed = 1;
  const int64_t fit = kBlockBytes / (p.inputs * static_cast<int64_t>(sizeof(S))) / kTogether * kTogether;
  const int64_t block = fit < kTogether ? kTogether : smaller(fit, kBlock);
  for (int64_t begin = outputs.begin; begin < outputs.end; begin += block) {
    const int64_t count = smaller(block, outputs.end - begin);
    if (p.rows <= kRowsAtOnce)
      multiply_some<Operands, kWeights, S>(p, x, width, 0, begin, count);
    else
      for (int64_t r = 0; r < p.rows; r += kRowsAtOnce)
        multiply_some<Operands, kWeightsAgain, S>(p, x, width, r, begin, count);
  }
}

}  // namespace

size_t linear_scratch(const LinearParams& p) {
  return static_cast<size_t>(p.rows * padded<float>(p.inputs)) * sizeof(float) + 128;
}

void linear_rows(const LinearParams& p, Range outputs, void* scratch) {
  switch (p.dtype) {
    case DType::kFloat32:
      return run<float>(p, outputs, scratch);
    case DType::kBFloat16:
      return run<BFloat16>(p, outputs, scratch);
    default:
      return run<Float16>(p, outputs, scratch);
  }
}

}  // namespace attnpack::ATTNPACK_ISA
