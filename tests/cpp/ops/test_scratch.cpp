// The kernels' working memory when there is none left.
#include <sys/resource.h>

#include "catch.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include <attnpack/threads/scratch.h>

namespace attnpack {

TEST_CASE("a call after one that got no memory gets its own") {
  constexpr size_t kMiB = size_t{1} << 20;
  using Buffer = ThreadScratch<7>;
  {
    const Buffer held(2 * kMiB);
  }
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  const rlimit none{1, before.rlim_max};
  bool refused = false;
  std::vector<void*> taken;  // what earlier tests have left free
  taken.reserve(4096);
  setrlimit(RLIMIT_AS, &none);
  while (void* block = std::malloc(4 * kMiB)) taken.push_back(block);
  try {
    const Buffer more(4 * kMiB);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  setrlimit(RLIMIT_AS, &before);
  for (void* block : taken) std::free(block);
  REQUIRE(refused);
  const Buffer next(kMiB);
  REQUIRE(next.data() != nullptr);
  std::memset(next.data(), 1, kMiB);
}

TEST_CASE("an absurd size is refused, and the next one served") {
  REQUIRE_THROWS_AS(ThreadScratch<7>(size_t{1} << 62), std::bad_alloc);
  REQUIRE(ThreadScratch<7>(64).data() != nullptr);
}

}  // namespace attnpack
