#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

namespace attnpack {

// Rows of numbers as bytes: integers of 8 or 4 bits in blocks of 32 numbers, and a scale in fp16 per block
// (core/quantized.h): 8.5 or 4.5 bits per number. With 4 bits each row is rotated by a Hadamard matrix first (QuaRot,
// Ashkboos et al. 2024, section 4), and dequantize_rows rotates it back. A block with a number that is not finite, or
// whose scale is beyond fp16, gives NaN.
at::Tensor quantize_rows(const at::Tensor& x,  // [..., dim], float dtypes
                         int64_t bits);        // -> [..., quantized_row_bytes(bits, dim)] uint8

// The numbers again, in dtype.
at::Tensor dequantize_rows(const at::Tensor& rows,  // [..., quantized_row_bytes(bits, dim)] uint8
                           int64_t bits, const c10::SymInt& dim, at::ScalarType dtype);  // -> [..., dim]

// The checks of all backends.
void check_quantize_rows(const at::Tensor& x, int64_t bits);
void check_dequantize_rows(const at::Tensor& rows, int64_t bits, const c10::SymInt& dim, at::ScalarType dtype);

// The same in ATen ops, for devices without a kernel.
at::Tensor quantize_rows_formula(const at::Tensor& x, int64_t bits);
at::Tensor dequantize_rows_formula(const at::Tensor& rows, int64_t bits, const c10::SymInt& dim, at::ScalarType dtype);

// Bytes of a row, for sizes that may be traced.
c10::SymInt sym_quantized_row_bytes(int64_t bits, const c10::SymInt& dim);

}  // namespace attnpack
