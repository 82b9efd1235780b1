// The tokens that a Sampler may draw.
#include <torch/torch.h>

#include "catch.h"

#include <attnpack/models/detail/sampler.h>

namespace attnpack {

namespace {

// How many different tokens come up in a thousand draws from as many tokens, all equally likely.
int64_t drawn(int64_t tokens, double top_p) {
  Sampler sampler(1.0, std::nullopt, top_p, 0, at::kCPU);
  return std::get<0>(at::_unique2(sampler(at::zeros({1000, tokens})))).numel();
}

}  // namespace

TEST_CASE("top_p keeps a token where the likelier ones hold less than it, not as much") {
  REQUIRE(drawn(4, 0.5) == 2);  // 0, 1/4, 1/2 and 3/4 are likelier
  REQUIRE(drawn(4, 0.51) == 3);
  REQUIRE(drawn(4, 1.0) == 4);
}

TEST_CASE("the likeliest token stays whatever top_p is") { REQUIRE(drawn(4, 1e-300) == 1); }

}  // namespace attnpack
