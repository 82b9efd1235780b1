#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

// Linear layers of many rows on the CPU. at::linear multiplies fp32 by MKL. torch also brings oneDNN, whose product is
// an op of its own, and twice as fast where MKL does not use the whole vectors of the CPU (PERFORMANCE.md).
namespace attnpack {

// Which kernel linear layers take, for any number of rows. kTable: our own for few rows, and for many rows the faster
// one, chosen only by the CPU, the dtype and the number of multiply-adds. So a program gives the same bits in each run.
enum class LinearKernel { kTable, kTorch, kOneDnn };

// The kernel that the environment variable ATTNPACK_LINEAR names ("torch" or "onednn"), or kTable.
LinearKernel pinned_linear_kernel();

// Whether our own kernel for few rows computes this layer, by the table.
bool takes_few_rows(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// The same before the call has reached the CPU's kernel: only tensors that have memory are asked for their sizes.
bool will_take_few_rows(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// Whether oneDNN computes this layer: by the table, or because it is pinned and takes the arguments.
bool takes_onednn(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// The rows [rows, columns] and as many rows of zeros as oneDNN is to see in fp32: the next one of eight numbers between
// two powers of two. oneDNN keeps memory for each shape that it meets, 0.4 MB and more. In 16 bit torch's linear is
// oneDNN too, so there is nothing to save.
at::Tensor with_round_rows(const at::Tensor& rows);

// input weight^T + bias by oneDNN. input and weight may be transposed views.
at::Tensor onednn_linear(const at::Tensor& input,                 // [..., in]
                         const at::Tensor& weight,                // [out, in]
                         const std::optional<at::Tensor>& bias);  // [out] -> [..., out]

// The kernels that this process takes, and why, in words.
std::string describe_linear_kernels();

}  // namespace attnpack
