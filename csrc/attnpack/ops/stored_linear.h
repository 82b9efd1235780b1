#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace attnpack {

// Weights as GGUF files hold them, in Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K: a uint8 tensor
// [out, blocks, bytes], whose bytes per block say which format it is. python/attnpack/reference.py has the formulas.

// Whether a tensor has the dtype and the number of dims of stored weights.
bool is_stored(const at::Tensor& weight);
// The numbers of a row of stored weights. Raises if the tensor is in none of the formats.
int64_t stored_inputs(const at::Tensor& weight);

// input weight^T + bias, in the dtype of input. With round_input each 32 numbers of the input are rounded to 8 bits of
// their largest one, and multiplied as integers. A largest one that is more than 4 root mean squares of its row and 1.3
// times the next is kept as it is, and the others are rounded without it. Without round_input the weight is widened to
// the input's dtype, some rows at a time. By default the CPU and the dtype decide: input is rounded where the CPU
// multiplies bytes, unless it is fp64. A row's result does not depend on how many rows there are, if input is rounded.
// It has no gradient: it raises RuntimeError for an input that wants one.
at::Tensor stored_linear(const at::Tensor& input,   // [..., in], float32, bfloat16, float16 or float64
                         const at::Tensor& weight,  // [out, blocks, bytes] uint8
                         const std::optional<at::Tensor>& bias = {},  // [out] -> [..., out]
                         std::optional<bool> round_input = {});

// The same of one input by several weights, which are read in one go. They may have different formats.
std::vector<at::Tensor> stored_linears(const at::Tensor& input,      // [..., in]
                                       at::TensorList weights,       // each [out, blocks, bytes] uint8
                                       at::TensorList biases = {});  // none, or one each [out] -> each [..., out]

// The numbers of stored rows, in dtype.
at::Tensor widen_stored(const at::Tensor& blocks,  // [rows, blocks, bytes] uint8
                        at::ScalarType dtype);     // -> [rows, in]

// Rows of a stored table by number, in dtype.
at::Tensor stored_rows(const at::Tensor& table,  // [rows, blocks, bytes] uint8
                       const at::Tensor& ids,    // [...] int32 or int64
                       at::ScalarType dtype);    // -> [..., in]

// A weight in symmetric blocks of 32 numbers: Q8_0 for 8 bits, Q4_0 for 4. Each scale is the one of several that leaves
// the smallest squared error. A step is at least 2^-24, the smallest number of fp16, so that smaller numbers beside
// large ones move by at most half of that. Raises for numbers that are not finite, and for a weight whose largest
// number is below 127 (with 4 bits 8) such steps.
at::Tensor to_stored(const at::Tensor& weight,  // [out, in], `in` a multiple of 32
                     int64_t bits);             // -> [out, in / 32, 34 or 18] uint8

// The checks of all backends.
void check_stored_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace attnpack
