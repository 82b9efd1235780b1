#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <limits>

namespace attnpack {

constexpr double kInf = std::numeric_limits<double>::infinity();  // -kInf: a key that is not chosen

// The places of the best n scores of each row, int32, the best first, and among equal scores the lower place first; -1
// for a score of -inf. On the CPU one pass over a row finds them.
at::Tensor best_numbers(const at::Tensor& scores,  // [..., keys], fp32 or fp64
                        const c10::SymInt& n);     // at most keys -> [..., n]

// The same by torch's ops.
at::Tensor best_numbers_formula(const at::Tensor& scores, const c10::SymInt& n);

}  // namespace attnpack
