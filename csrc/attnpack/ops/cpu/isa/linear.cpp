#include <attnpack/ops/cpu/isa/dot.h>

// A linear layer for few rows. The weight is streamed once, row by row, and each row of it serves all rows of the
// input.
namespace attnpack::ATTNPACK_ISA {
namespace {

constexpr int64_t kTogether = 4;            // the outputs of a block are a multiple of this
constexpr int64_t kBlock = 64;              // most outputs of a block
constexpr int64_t kBlockBytes = 128 << 10;  // most bytes of weights that all rows read, so that L2 keeps them
constexpr int64_t kColumnBytes = 4 << 10;   // of these, most of one row: L1 keeps that part of several rows of input
// More rows find a block again in L2, and are faster all the same if it is prefetched into L1 (PERFORMANCE.md).
constexpr Stream kWeights{5 << 10};

// Rows that share each load of a weight. Eight rows by two weights are enough sums in flight to hide the time of an
// addition (PERFORMANCE.md).
constexpr int64_t kMostTogether = kRegisters == 32 ? 8 : kRowsAtOnce;
int64_t rows_together(int64_t rows) { return rows >= kMostTogether ? kMostTogether : smaller(rows, kRowsAtOnce); }

// The weights of a block that several groups of input rows read in turn. Each group prefetches its share of the next
// block into L2, so that memory is read all the time, and not only by the first group (gain: PERFORMANCE.md).
constexpr Stream kNextBlock{0, true};
template <class S>
struct SharedRows {
  const S *first, *next;
  int64_t stride, group, groups;
  int64_t most_ahead() const { return 0; }
  const S* operator[](int64_t i) const { return first + i * stride; }
  const S* ahead(int64_t i) const { return (i / kTogether % groups == group ? next : first) + i * stride; }
};

// s[r, j] = x[r] . w[j] for some columns; the products of further columns are added. A row of s has kBlock numbers.
// Not inlined: next to the loops for more rows, the compiler makes the loop for one row slower (PERFORMANCE.md).
template <class Operands, int Rows, Stream stream, class RowsOfW>
[[gnu::noinline]] void multiply_rows(const typename Operands::Element* x, int64_t width, const RowsOfW& w,
                                     int64_t count, int64_t columns, bool further, float* s) {
  float part[Rows * kBlock];
  dot_products<Operands, Rows, stream, kColumnBytes / sizeof(ElementOf<RowsOfW>)>(x, width, w, count, columns,
                                                                                  further ? part : s, kBlock);
  for (int64_t r = 0; further && r < Rows; ++r)
    for (int64_t j = 0; j < count; ++j) s[r * kBlock + j] += part[r * kBlock + j];
}

template <class S, class Out>
void store_outputs(const LinearParams& p, int64_t begin, int64_t count, const float* s) {
  float bias[kBlock];
  for (int64_t j = 0; j < count; ++j) bias[j] = p.bias ? load_one(static_cast<const S*>(p.bias) + begin + j) : 0.0f;
  for (int64_t r = 0; r < p.rows; ++r) {
    Out* out = static_cast<Out*>(p.out) + r * p.outputs + begin;
    for (int64_t j = 0; j < count; ++j) store_one(out + j, s[r * kBlock + j] + bias[j]);
  }
}

// The rows of the input in whole vectors, [rows, width]. Rows of fp32 that are whole vectors are read where they are.
template <class S, class Operands, class E = typename Operands::Element>
const E* packed_rows(const LinearParams& p, int64_t width, void* scratch) {
  const S* input = static_cast<const S*>(p.input);
  if constexpr (std::is_same_v<S, E>)
    if (width == p.inputs) return input;
  Arena arena(scratch);
  int64_t* packed = arena.take<int64_t>(1);  // at the start of scratch, which the owner has zeroed
  E* x = arena.take<E>(p.rows * width);
  for (int64_t r = 0; r < p.rows && !*packed; ++r)
    Operands::pack_row(input + r * p.inputs, p.inputs, x + r * width, width);
  *packed = 1;
  return x;
}

template <class S>
void compute_outputs(const LinearParams& p, Range outputs, void* scratch) {
  using Operands = OperandsOf<S, float>;
  using E = typename Operands::Element;
  const int64_t width = padded<E>(steps<Operands>(p.inputs));
  const E* x = packed_rows<S, Operands>(p, width, scratch);
  // Few rows read each weight once, so they read whole rows of it. They add up its parts all the same, so that a row's
  // result does not depend on how many rows there are.
  const int64_t most = p.rows <= kRowsAtOnce ? p.inputs : kColumnBytes / static_cast<int64_t>(sizeof(S));
  const int64_t columns = smaller(p.inputs, most);
  const int64_t fit = kBlockBytes / (columns * static_cast<int64_t>(sizeof(S))) / kTogether * kTogether;
  const int64_t block = fit < kTogether ? kTogether : smaller(fit, kBlock);
  int64_t groups = 0;
  for (int64_t r = 0; r < p.rows; ++groups) r += rows_together(p.rows - r);
  float s[kFewRows * kBlock];
  for (int64_t begin = outputs.begin; begin < outputs.end; begin += block) {
    const int64_t count = smaller(block, outputs.end - begin);
    for (int64_t c = 0; c < p.inputs; c += columns) {
      const S* first = static_cast<const S*>(p.weight) + begin * p.weight_stride + c;
      const S* next = c + columns < p.inputs ? first + columns : first - c + block * p.weight_stride;
      for (int64_t r = 0, group = 0, some; r < p.rows; r += some, ++group) {
        some = rows_together(p.rows - r);
        const auto multiply_by = [&](auto rows, auto stream, const auto& w) {
          multiply_rows<Operands, rows, stream>(x + r * width + c / Operands::kStep, width, w, count,
                                                smaller(columns, p.inputs - c), c > 0, s + r * kBlock);
        };
        const auto multiply = [&](auto rows) {
          if (groups > 1)
            multiply_by(rows, std::integral_constant<Stream, kNextBlock>(),
                        SharedRows<S>{first, next, p.weight_stride, group, groups});
          else
            multiply_by(rows, std::integral_constant<Stream, kWeights>(), StridedRows<S>{first, p.weight_stride});
        };
        if (some > kRowsAtOnce)
          multiply(std::integral_constant<int, kMostTogether>());
        else
          with_rows(some, multiply);
      }
    }
    p.float_out ? store_outputs<S, float>(p, begin, count, s) : store_outputs<S, S>(p, begin, count, s);
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
