#pragma once

#include <attnpack/core/params.h>

// Weights as GGUF files hold them: each row in blocks of codes with their scales. A number is scale * code + offset
// (python/attnpack/reference.py has the formulas). Plain C++, for kernels too.
namespace attnpack {

enum class StoredFormat : int32_t { kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K };

struct StoredLayout {
  const char* name;
  StoredFormat format;
  int64_t numbers, bytes;  // of a block
};

// No two formats have blocks of one size, so a tensor [rows, blocks, bytes] says which it has.
constexpr StoredLayout kStoredLayouts[] = {
    {"Q8_0", StoredFormat::kQ8_0, 32, 34},   {"Q4_0", StoredFormat::kQ4_0, 32, 18},
    {"Q4_1", StoredFormat::kQ4_1, 32, 20},   {"Q5_0", StoredFormat::kQ5_0, 32, 22},
    {"Q5_1", StoredFormat::kQ5_1, 32, 24},   {"Q4_K", StoredFormat::kQ4_K, 256, 144},
    {"Q5_K", StoredFormat::kQ5_K, 256, 176}, {"Q6_K", StoredFormat::kQ6_K, 256, 210},
};

constexpr int64_t kRoundedBlock = 32;  // numbers of an input that share a scale
// Most rows of the input that a unit multiplies, and the number of which the outputs of a unit are a multiple.
constexpr int64_t kStoredRows = 192, kStoredOutputs = 32;
constexpr int64_t kRoundedRows = 6;  // rows of the input that a unit rounds: whole tiles of every kernel

// 32 numbers of an input, rounded to scale * codes: 8 bits of their largest number. A number that stands far out of its
// row and its block would leave the others few steps: it is kept as it is, and its code is 0.
struct RoundedBlock {
  int8_t codes[kRoundedBlock];
  float scale;
  float sum;      // of the rounded numbers
  float half[2];  // of the first and the last 16 of them
  float kept;
  int16_t kept_at, row;  // which number of a panel of blocks is kept, or -1; which row of its tile this is
  uint32_t marks;        // for the kernels: which of 32 blocks keep a number
};

// out [rows, outputs] = input [rows, inputs] weight^T + bias, all contiguous.
struct StoredLinearParams {
  int64_t rows, inputs, outputs;
  StoredFormat format;
  DType dtype;  // of input, bias and out
  const void* input;
  RoundedBlock* rounded;  // [rows * inputs / 32]: written by round_input, in an order that the kernels know
  const uint8_t* weight;  // [outputs, row_bytes]
  int64_t row_bytes;
  const uint8_t* following;  // the weight that is read next, or null
  const void* bias;          // [outputs] or null
  void* out;
};

// Rows of blocks, and their numbers in dtype, all contiguous.
struct StoredRowsParams {
  int64_t inputs;
  StoredFormat format;
  DType dtype;
  const uint8_t* rows;
  int64_t row_bytes;
  void* out;
};

}  // namespace attnpack
