#include <attnpack/layers/alibi.h>

#include <cmath>

#include <attnpack/core/check.h>

namespace attnpack {

std::vector<double> alibi_slopes(int64_t num_heads) {
  ATTNPACK_CHECK(num_heads > 0, "num_heads: got ", num_heads, ", want at least 1");
  int64_t whole = 1;
  while (2 * whole <= num_heads) whole *= 2;
  std::vector<double> slopes(num_heads);
  for (int64_t h = 0; h < num_heads; ++h) {
    const auto step = static_cast<double>(h < whole ? 2 * (h + 1) : 2 * (h - whole) + 1);
    slopes[h] = std::exp2(-4 * step / static_cast<double>(whole));
  }
  return slopes;
}

}  // namespace attnpack
