#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include <attnpack/ops/cpu/scratch.h>

namespace attnpack {

// Below this many multiply-adds a call stays on its thread.
constexpr double kSerialWork = 1 << 17;

// Hands out units 0 .. count - 1, one at a time, to the threads; each has its own scratch. A unit's result does not
// depend on who computes it.
template <class F>
void for_each_unit(int64_t count, double work, size_t scratch_bytes, F&& unit) {
  std::atomic<int64_t> next{0};
  const auto worker = [&](int64_t, int64_t) {
    const Scratch<0> scratch(scratch_bytes);
    if (scratch_bytes >= sizeof(int64_t)) *static_cast<int64_t*>(scratch.data()) = 0;
    for (int64_t i = next++; i < count; i = next++) unit(i, scratch.data());
  };
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  if (threads <= 1 || work < kSerialWork)
    worker(0, 1);
  else
    at::parallel_for(0, threads, 1, worker);
}

}  // namespace attnpack
