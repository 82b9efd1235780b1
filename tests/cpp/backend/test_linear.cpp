#include "catch.h"

#include <attnpack/attnpack.h>

TEST_CASE("at::linear runs on the faster kernel until each replacement is disabled") {
  torch::manual_seed(0);
  const auto x = torch::randn({130, 160}, torch::requires_grad()), weight = torch::randn({192, 160});
  const auto expected = at::linear(x, weight);
  const auto gradient = torch::autograd::grad({expected.sum()}, {x})[0];
  attnpack::reset_linear_report();
  auto outer = attnpack::enable_linear();
  {
    const attnpack::ReplacementGuard guard(attnpack::enable_linear());
    outer.disable();
    CHECK(attnpack::linear_enabled());
    const auto out = at::linear(x, weight);
    CHECK(torch::allclose(out, expected, 1e-4, 1e-4));
    CHECK(torch::allclose(torch::autograd::grad({out.sum()}, {x})[0], gradient, 1e-4, 1e-4));
    const auto report = attnpack::linear_report();
    CHECK(report.taken + static_cast<int64_t>(report.passed_on.size()) >= 1);
    CHECK_THROWS_AS(at::linear(x, weight.t()), c10::Error);
  }
  CHECK_FALSE(attnpack::linear_enabled());
  CHECK(torch::equal(at::linear(x, weight), expected));
}
