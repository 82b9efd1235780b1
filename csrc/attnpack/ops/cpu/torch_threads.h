#pragma once

#include <attnpack/ops/cpu/threads.h>
#include <attnpack/ops/cpu/work_units.h>

namespace attnpack {

// Hands units to torch's threads.
struct TorchThreads {
  static int64_t count() { return at::get_num_threads(); }
  template <class F>
  void operator()(Order order, int64_t units, double work, size_t scratch_bytes, F&& unit) const {
    for_each_unit(units, work, scratch_bytes, unit, order == Order::kNeighbours);
  }
};
constexpr TorchThreads kTorchThreads;

}  // namespace attnpack
