#pragma once

#include <attnpack/ops/cpu/work_units.h>
#include <attnpack/threads/threads.h>

namespace attnpack {

// Hands units to the threads of for_each_unit.
struct LoopThreads {
  static int64_t count() { return loop_threads(); }
  template <class F>
  void operator()(Order order, int64_t units, double work, size_t scratch_bytes, F&& unit) const {
    for_each_unit(units, work, scratch_bytes, unit, order == Order::kNeighbours);
  }
};
constexpr LoopThreads kLoopThreads;

}  // namespace attnpack
