#include <attnpack/ops/cpu/isa/dot.h>

// A linear layer for few rows. The weight is streamed once, row by row, and each row of it serves all rows of the
// input.
namespace attnpack::ATTNPACK_ISA {
namespace {

constexpr int64_t kTogether = 4;                // the outputs of a block are a multiple of this
constexpr int64_t kBlock = 64;                  // most outputs of a block
constexpr int64_t kBlockBytes = 128 << 10;      // most bytes of a block's weights, so that L2 keeps them for more rows
constexpr Stream kWeights{5 << 10};             // few rows read a weight once
constexpr Stream kWeightsAgain{8 << 10, true};  // more rows read it several times

// Rows that share each load of a weight. Eight rows by two weights are enough sums in flight to hide the time of an
// addition (PERFORMANCE.md).
constexpr int64_t kMostTogether = kRegisters == 32 ? 8 : kRowsAtOnce;
int64_t rows_together(int64_t rows) { return rows >= kMostTogether ? kMostTogether : smaller(rows, kRowsAtOnce); }

// Not inlined: next to the loops for more rows, the compiler makes the loop for one row slower (PERFORMANCE.md).
template <class Operands, int Rows, Stream stream, class S>
[[gnu::noinline]] void multiply_rows(const LinearParams& p, const typename Operands::Element* x, int64_t width,
                                     int64_t first, int64_t begin, int64_t count) {
  float s[Rows * kBlock];
  dot_products<Operands, Rows, stream>(x + first * width, width,
                                       StridedRows<S>{static_cast<const S*>(p.weight), p.weight_stride}.from(begin),
                                       count, p.inputs, s, kBlock);
  float bias[kBlock];
  for (int64_t j = 0; j < count; ++j) bias[j] = p.bias ? load_one(static_cast<const S*>(p.bias) + begin + j) : 0.0f;
  for (int64_t r = 0; r < Rows; ++r) {
    S* out = static_cast<S*>(p.out) + (first + r) * p.outputs + begin;
    for (int64_t j = 0; j < count; ++j) store_one(out + j, s[r * kBlock + j] + bias[j]);
  }
}

template <class S>
void compute_outputs(const LinearParams& p, Range outputs, void* scratch) {
  using Operands = OperandsOf<S, float>;
  using E = typename Operands::Element;
  const int64_t width = padded<E>(steps<Operands>(p.inputs));
  Arena arena(scratch);
  int64_t* packed = arena.take<int64_t>(1);  // at the start of scratch, which the owner has zeroed
  E* x = arena.take<E>(p.rows * width);
  for (int64_t r = 0; r < p.rows && !*packed; ++r)
    Operands::pack_row(static_cast<const S*>(p.input) + r * p.inputs, p.inputs, x + r * width, width);
  *packed = 1;
  const int64_t fit = kBlockBytes / (p.inputs * static_cast<int64_t>(sizeof(S))) / kTogether * kTogether;
  const int64_t block = fit < kTogether ? kTogether : smaller(fit, kBlock);
  for (int64_t begin = outputs.begin; begin < outputs.end; begin += block) {
    const int64_t count = smaller(block, outputs.end - begin);
    const bool once = p.rows <= kRowsAtOnce;
    for (int64_t r = 0, some; r < p.rows; r += some) {
      some = rows_together(p.rows - r);
      if (some > kRowsAtOnce)
        multiply_rows<Operands, kMostTogether, kWeightsAgain, S>(p, x, width, r, begin, count);
      else
        with_rows(some, [&](auto rows) {
          if (once)
            multiply_rows<Operands, rows, kWeights, S>(p, x, width, r, begin, count);
          else
            multiply_rows<Operands, rows, kWeightsAgain, S>(p, x, width, r, begin, count);
        });
    }
  }
}

}  // namespace

size_t linear_scratch(const LinearParams& p) {
  return static_cast<size_t>(p.rows * padded<float>(p.inputs)) * sizeof(float) + 128;
}

void linear_rows(const LinearParams& p, Range outputs, void* scratch) {
  switch (p.dtype) {
    case DType::kFloat32:
      return compute_outputs<float>(p, outputs, scratch);
    case DType::kBFloat16:
      return compute_outputs<BFloat16>(p, outputs, scratch);
    default:
      return compute_outputs<Float16>(p, outputs, scratch);
  }
}

}  // namespace attnpack::ATTNPACK_ISA
