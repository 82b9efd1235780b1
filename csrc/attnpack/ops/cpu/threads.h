#pragma once

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>

#include <attnpack/ops/cpu/scratch.h>

namespace attnpack {

// Below this many multiply-adds a call stays on its thread.
constexpr double kSerialWork = 1 << 17;

// Hands out units 0 .. count - 1, one at a time, to the threads; each thread has its own scratch. A unit's result does
// not depend on the thread. Without `neighbours`, a thread takes the first unit that is left. With `neighbours`, one
// thread should do neighbouring units one after the other: each thread begins with a share of its own, and then takes
// the units that are left in other shares.
template <class F>
void for_each_unit(int64_t count, double work, size_t scratch_bytes, F&& unit, bool neighbours = false) {
  const int64_t most = work < kSerialWork ? 1 : std::min<int64_t>(at::get_num_threads(), count);
  const int64_t threads = std::max<int64_t>(most, 1), shares = neighbours ? threads : 1;
  c10::SmallVector<int64_t, 64> next(shares);
  for (int64_t i = 0; i < shares; ++i) next[i] = count * i / shares;
  const auto worker = [&](int64_t thread, int64_t) {
    const ThreadScratch<0> scratch(scratch_bytes);
    if (scratch_bytes >= sizeof(int64_t)) *static_cast<int64_t*>(scratch.data()) = 0;
    for (int64_t t = thread; t < thread + shares; ++t) {
      const int64_t share = t % shares, end = count * (share + 1) / shares;
      for (int64_t i; (i = std::atomic_ref<int64_t>(next[share])++) < end;) unit(i, scratch.data());
    }
  };
  if (threads == 1)
    worker(0, 1);
  else
    at::parallel_for(0, threads, 1, worker);
}

}  // namespace attnpack
