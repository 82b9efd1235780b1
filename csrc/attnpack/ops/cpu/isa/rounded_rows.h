#pragma once

#include <attnpack/core/stored.h>
#include <attnpack/ops/cpu/isa/byte_products.h>

// Rows of an input as codes of 8 bits, in blocks of 32.
namespace attnpack::ATTNPACK_ISA {

#if defined(ATTNPACK_BYTE_PRODUCTS)
// Rows of the input and vectors of outputs whose sums stand in registers.
constexpr int kRowsTogether = kRegisters == 32 ? 6 : 2;
#else
constexpr int kRowsTogether = 1;
#endif
// A tile is of one unit: its rows are rounded in order, and share marks.
static_assert(kRoundedRows % kRowsTogether == 0 && kStoredRows % kRowsTogether == 0);

// The rounded blocks of rows that are multiplied together stand side by side: [tile][block][row of the tile].
struct RoundedTile {
  RoundedBlock* first;
  int64_t rows;
  RoundedTile(const StoredLinearParams& p, int64_t row)
      : first(p.rounded + row / kRowsTogether * kRowsTogether * (p.inputs / kRoundedBlock)),
        rows(smaller(kRowsTogether, p.rows - row / kRowsTogether * kRowsTogether)) {}
  RoundedBlock& at(int64_t block, int64_t row) const { return first[block * rows + row]; }
};

// The blocks of a tile that keep a number: bit i % kMarks of block i / kMarks of each panel's blocks.
constexpr int64_t kMarks = 32;

// Most inputs of a panel of the weight.
constexpr int64_t kPanelInputs = 512;
constexpr int64_t kPanelBlocks = kPanelInputs / kRoundedBlock;

typedef int8_t Codes __attribute__((vector_size(kVectorBytes / 4)));  // as many as a vector has floats

// A number is kept as it is if it is this many times larger than the root of the mean square of its row, and than the
// others of its block. With 4 and 1.3 a sixth of the blocks of SmolLM2-135M keep one, and the loss of a token moves by
// a root mean square of 0.035; with 6 and 1.3 a tenth and 0.042, without 0.080.
constexpr float kOfRow = 4.0f, kOfBlock = 1.3f;

template <class S>
float root_mean_square(const S* x, int64_t count) {
  constexpr int kVectors = static_cast<int>(kRoundedBlock) / kLanes<float>;
  Vec<float> sums[kVectors] = {}, sum{};
  for (int64_t first = 0; first < count; first += kRoundedBlock)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const Vec<float> v = load<float>(x + first + i * kLanes<float>);
      sums[i] += v * v;
    }
  for (int i = 0; i < kVectors; ++i) sum += sums[i];
  return __builtin_sqrtf(fold_lanes<float>(sum, Add()) / static_cast<float>(count));
}

// Takes the largest number out of a block in which it stands far out. Returns the largest of the others, or else `top`.
inline float take_outlier(float* x, float top, RoundedBlock& to) {
  int largest = -1;
  float second = 0;
  for (int i = 0; i < kRoundedBlock; ++i) {
    const float size = x[i] < 0 ? -x[i] : x[i];
    if (size == top && largest < 0)
      largest = i;
    else
      second = size > second ? size : second;
  }
  if (largest < 0 || second * kOfBlock >= top) return top;
  to.kept_at = static_cast<int16_t>(largest);
  to.kept = x[largest];
  x[largest] = 0;
  return second;
}

template <class S>
void round_block(const S* from, float large, RoundedBlock& to) {
  constexpr int kVectors = static_cast<int>(kRoundedBlock) / kLanes<float>;
  alignas(kVectorBytes) float x[kRoundedBlock];
  Vec<float> v[kVectors], largest{}, not_finite{};
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    v[i] = load<float>(from + i * kLanes<float>);
    largest = Larger()(v[i] < 0 ? -v[i] : v[i], largest);  // of a NaN and a number the number
    not_finite += v[i] * 0.0f;
  }
  float top = fold_lanes<float>(largest, Larger());
  const float finite = fold_lanes<float>(not_finite, Add());
  to.kept_at = -1;
  if (top > large && finite == 0) {
    for (int i = 0; i < kVectors; ++i) store<float>(x + i * kLanes<float>, v[i]);
    top = take_outlier(x, top, to);
    for (int i = 0; i < kVectors; ++i) v[i] = load<float>(x + i * kLanes<float>);
  }
  const float factor = top > 0x1p-100f && finite == 0 ? 127.0f / top : 0.0f;
  to.scale = top * (1.0f / 127.0f) + finite;
  float sums[2] = {};
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    const Vec<float> code = factor == 0 ? Vec<float>{} : (v[i] * factor + 12582912.0f) - 12582912.0f;
    sums[2 * i / kVectors] += fold_lanes<float>(code, Add());
    const auto codes = __builtin_convertvector(__builtin_convertvector(code, VectorTypes<float>::Int), Codes);
    __builtin_memcpy(to.codes + i * kLanes<float>, &codes, sizeof(codes));
  }
  to.sum = to.scale * (sums[0] + sums[1]);
  to.half[0] = to.scale * sums[0];
  to.half[1] = to.scale * sums[1];
}

// Row r of the input, after the rows before it in its tile.
template <class S>
void round_row(const StoredLinearParams& p, int64_t r) {
  const RoundedTile to(p, r);
  const int64_t row = r % kRowsTogether, blocks = p.inputs / kRoundedBlock;
  const S* const from = static_cast<const S*>(p.input) + r * p.inputs;
  const float large = kOfRow * root_mean_square(from, p.inputs);
  if (row == 0)
    for (int64_t i = 0; i < blocks * to.rows; ++i) to.first[i].marks = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    RoundedBlock& block = to.at(b, row);
    round_block(from + b * kRoundedBlock, large, block);
    block.row = static_cast<int16_t>(row);
    if (block.kept_at < 0) continue;
    const int64_t of_panel = b % kPanelBlocks, at = of_panel * to.rows + row;
    block.kept_at = static_cast<int16_t>(block.kept_at + of_panel * kRoundedBlock);
    to.first[(b - of_panel) * to.rows + at / kMarks].marks |= 1u << at % kMarks;
  }
}

}  // namespace attnpack::ATTNPACK_ISA
