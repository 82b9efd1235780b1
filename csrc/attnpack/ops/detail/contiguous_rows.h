#pragma once

#include <ATen/core/Tensor.h>

namespace attnpack {

// A contiguous copy of matrices on the CPU that are stored by columns: x [..., R, C] with x.stride(-2) = 1. Each thread
// transposes blocks through memory of its own, because columns that lie powers of two apart share few lines of the
// cache: at::contiguous takes up to eight times as long, and it copies a batch of such matrices number by number.
at::Tensor contiguous_rows(const at::Tensor& x);

}  // namespace attnpack
