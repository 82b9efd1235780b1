#pragma once

#include <attnpack/core/params.h>

// Quantised rows: the numbers of a row in blocks, each block as integers with one scale in fp16. The bytes of a row are
// the integers of all its blocks, then their scales.
namespace attnpack {

constexpr int64_t kQuantizedBlock = 32;  // numbers that share a scale; the last block of a row may be shorter

ATTNPACK_HD constexpr int64_t quantized_blocks(int64_t dim) { return (dim + kQuantizedBlock - 1) / kQuantizedBlock; }

// Two integers of 4 bits share a byte.
ATTNPACK_HD constexpr int64_t code_bytes(int64_t bits, int64_t dim) { return bits == 8 ? dim : (dim + 1) / 2; }

ATTNPACK_HD constexpr int64_t quantized_row_bytes(int64_t bits, int64_t dim) {
  return code_bytes(bits, dim) + 2 * quantized_blocks(dim);
}

// How many numbers a Hadamard matrix rotates together: the largest power of two that divides dim.
ATTNPACK_HD constexpr int64_t hadamard_size(int64_t dim) { return dim & -dim; }

// Rows of dim numbers, and the same rows quantised; all contiguous.
struct QuantizeParams {
  int64_t dim, bits;
  DType dtype;  // of the numbers
  const void* from;
  void* to;
};

}  // namespace attnpack
