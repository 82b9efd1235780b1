#pragma once

#include <ATen/core/Tensor.h>

namespace attnpack {

// Fixed positions (Vaswani et al. 2017, section 3.5), fp32 [positions, dim]: at position p, dims 2i and 2i + 1 hold the
// sine and the cosine of p / base^(2i / dim). As the rows of an Embedding they are a stack's embed_positions. dim is
// even.
at::Tensor sinusoidal_positions(int64_t positions, int64_t dim, double base = 10000.0);

}  // namespace attnpack
