#pragma once

#include <ATen/core/Tensor.h>

namespace attnpack {

// at::empty for the result of a kernel, contiguous. Small results on the CPU take memory that results before them gave
// back: in a decoding step of a small model the system's aligned memory costs as much as the attention.
at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options);

// The same in the layout of a tensor.
at::Tensor empty_result_like(const at::Tensor& like);

}  // namespace attnpack
