#include <attnpack/layers/spread.h>

#include <attnpack/core/check.h>

#include <utility>

namespace attnpack {

namespace {

thread_local const Spread* spread_here = nullptr;

}  // namespace

const Spread* spread() { return spread_here; }

const Spread* spread_by(const Spread* over) { return std::exchange(spread_here, over); }

void refuse_spread(const char* what, const char* fix) {
  ATTNPACK_CHECK(!spread_here, what, " under ContextParallel, where no process has all keys: ", fix);
}

}  // namespace attnpack
