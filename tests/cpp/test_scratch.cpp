// The kernels' working memory when there is none to be had.
#include <sys/resource.h>

#include "catch.h"

#include <cstring>
#include <new>

#include <attnpack/ops/cpu/scratch.h>

namespace attnpack {

TEST_CASE("a call after one that got no memory gets its own") {
  constexpr size_t kMiB = size_t{1} << 20;
  using Buffer = Scratch<7>;
  {
    const Buffer held(2 * kMiB);
  }
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  const rlimit none{1, before.rlim_max};
  bool refused = false;
  setrlimit(RLIMIT_AS, &none);
  try {
    const Buffer more(4 * kMiB);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  setrlimit(RLIMIT_AS, &before);
  REQUIRE(refused);
  const Buffer next(kMiB);
  REQUIRE(next.data() != nullptr);
  std::memset(next.data(), 1, kMiB);
}

TEST_CASE("an absurd size is refused, and the next one served") {
  REQUIRE_THROWS_AS(Scratch<7>(size_t{1} << 62), std::bad_alloc);
  REQUIRE(Scratch<7>(64).data() != nullptr);
}

}  // namespace attnpack
