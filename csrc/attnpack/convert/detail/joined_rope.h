#pragma once

#include <attnpack/rope/scaling.h>

#include <cstdint>
#include <vector>

namespace attnpack::convert {

// The scaling of a key in which each frequency of `rope` has that many pairs, for a RotaryEmbedding of the same base:
// longrope's divisors can give any frequencies, so they are those that the base has over those that are wanted.
RopeScaling joined_scaling(const RopeSettings& rope, const std::vector<int64_t>& pairs, double base,
                           int64_t max_positions);

}  // namespace attnpack::convert
