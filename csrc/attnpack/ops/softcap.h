#pragma once

#include <ATen/core/Tensor.h>

namespace attnpack {

// c tanh(x / c) for a softcap c > 0, else x (Gemma 2, 2024, section 2).
at::Tensor softcapped(const at::Tensor& x, double softcap);

}  // namespace attnpack
