#pragma once

#include <cstdint>
#include <vector>

namespace attnpack {

// The slope of each head: 2^(-8 i / n), i = 1 .. n, for n heads, a power of two; for other n the slopes of the power
// of two below it, then each second one of twice as many heads (Press et al. 2022, section 3 and its code).
std::vector<double> alibi_slopes(int64_t num_heads);

}  // namespace attnpack
