#include "catch.h"

#include <attnpack/attnpack.h>

namespace {

torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k) {
  return at::scaled_dot_product_attention(q, k, k, std::nullopt, 0.0, /*is_causal=*/true, std::nullopt,
                                          /*enable_gqa=*/true);
}

}  // namespace

TEST_CASE("at::scaled_dot_product_attention runs on the operator until each replacement is disabled") {
  attnpack::reset_sdpa_report();
  torch::manual_seed(0);
  const auto q = torch::randn({2, 4, 9, 8}, torch::requires_grad()), k = torch::randn({2, 2, 7, 8});
  const auto expected = attend(q, k);
  const auto gradient = torch::autograd::grad({expected.sum()}, {q})[0];
  CHECK(attnpack::sdpa_report().taken == 0);

  auto outer = attnpack::enable_sdpa();
  {
    const attnpack::SdpaGuard guard;
    outer.disable();
    outer.disable();
    CHECK_FALSE(outer.enabled());
    CHECK(attnpack::sdpa_enabled());
    const auto out = attend(q, k);
    CHECK(torch::allclose(out, expected, 1e-5, 1e-6));
    CHECK(torch::allclose(torch::autograd::grad({out.sum()}, {q})[0], gradient, 1e-5, 1e-6));
  }
  CHECK_FALSE(attnpack::sdpa_enabled());
  attend(q, k);
  CHECK(attnpack::sdpa_report().taken == 1);
}

TEST_CASE("a call that the operator does not take is passed on and counted") {
  attnpack::reset_sdpa_report();
  const attnpack::SdpaGuard guard;
  const auto q = torch::randn({2, 4, 9, 8});
  CHECK_THROWS_AS(attend(q, torch::randn({2, 3, 7, 8})), c10::Error);
  const auto report = attnpack::sdpa_report();
  CHECK(report.taken == 0);
  REQUIRE(report.passed_on.size() == 1);
  CHECK(report.passed_on[0].second == 1);
  CHECK(report.passed_on[0].first.find("heads") != std::string::npos);
}
