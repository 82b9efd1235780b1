#pragma once

#include <attnpack/ops/cpu/threads.h>
#include <attnpack/ops/cpu/work_units.h>

namespace attnpack {

// Hands units to torch's threads.
constexpr auto kTorchThreads = [](Order order, int64_t count, double work, size_t scratch_bytes, auto&& unit) {
  for_each_unit(count, work, scratch_bytes, unit, order == Order::kNeighbours);
};

}  // namespace attnpack
