#pragma once

#include <cstdint>
#include <vector>

namespace attnpack {

// The slope of each of n heads. If n is a power of two: 2^(-8 i / n), i = 1 .. n. For other n: the slopes of the power
// of two below n, then each second slope of twice that power (Press et al. 2022, section 3 and its code).
std::vector<double> alibi_slopes(int64_t num_heads);

}  // namespace attnpack
