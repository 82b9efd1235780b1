#pragma once

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

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

// The same, where neighbours are best done by one thread, one after the other: each begins with a share of its own, and
// then takes from those that are left of the others'.
template <class F>
void for_each_neighbour(int64_t count, double work, size_t scratch_bytes, F&& unit) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  if (threads <= 1 || work < kSerialWork) return for_each_unit(count, work, scratch_bytes, unit);
  c10::SmallVector<int64_t, 64> next(threads);
  for (int64_t t = 0; t < threads; ++t) next[t] = count * t / threads;
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    const Scratch<0> scratch(scratch_bytes);
    if (scratch_bytes >= sizeof(int64_t)) *static_cast<int64_t*>(scratch.data()) = 0;
    for (int64_t t = first; t < last + threads - 1; ++t) {
      const int64_t share = t % threads, end = count * (share + 1) / threads;
      for (int64_t i; (i = std::atomic_ref<int64_t>(next[share])++) < end;) unit(i, scratch.data());
    }
  });
}

}  // namespace attnpack
