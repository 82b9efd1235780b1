#include <attnpack/attnpack.h>

#include <catch2/catch.hpp>

namespace {

using attnpack::dequantize_rows;
using attnpack::dequantize_rows_formula;
using attnpack::quantize_rows;
using attnpack::quantize_rows_formula;

TEST_CASE("Quantised rows: the kernel and the formula of devices without one agree") {
  torch::manual_seed(0);
  for (const int64_t bits : {8, 4})
    for (const int64_t dim : {1, 2, 31, 32, 33, 48, 64, 80, 128, 576}) {
      auto x = torch::randn({64, dim});
      x[1].zero_();
      x[2][dim / 2] = NAN;
      const auto rows = quantize_rows(x, bits), want = quantize_rows_formula(x, bits);
      REQUIRE(rows.sizes() == want.sizes());
      // Few rows may differ: a tie falls to the other side where sums have another order.
      CHECK((rows == want).all(-1).to(torch::kDouble).mean().item<double>() > 0.9);
      for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16})
        CHECK(torch::allclose(dequantize_rows(rows, bits, dim, dtype), dequantize_rows_formula(rows, bits, dim, dtype),
                              1e-2, 1e-5, /*equal_nan=*/true));
    }
}

}  // namespace
