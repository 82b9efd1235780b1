#include <attnpack/rope/sinusoidal.h>

#include <ATen/ATen.h>

#include <cmath>

#include <attnpack/core/check.h>
#include <attnpack/core/sizes.h>

namespace attnpack {

at::Tensor sinusoidal_positions(int64_t positions, int64_t dim, double base) {
  ATTNPACK_CHECK(positions > 0, "positions: got ", positions, ", want at least 1");
  ATTNPACK_CHECK(dim > 0 && dim % 2 == 0, "dim: got ", dim,
                 ", want an even number: each frequency has a sine and a cosine");
  ATTNPACK_CHECK(base > 0 && std::isfinite(base), "base: got ", base, ", want a number above 0 such as 10000");
  check_storable("positions and dim", {positions, dim}, sizeof(double));
  const auto frequencies = at::pow(base, at::arange(0, dim, 2, at::kDouble) / -static_cast<double>(dim));
  const auto angles = at::outer(at::arange(positions, at::kDouble), frequencies);
  return at::stack({angles.sin(), angles.cos()}, 2).flatten(1).to(at::kFloat);
}

}  // namespace attnpack
