#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>

#include <attnpack/threads/scratch.h>

namespace attnpack {

// Below this many multiply-adds a call stays on its thread.
constexpr double kSerialWork = 1 << 17;

// How many threads a loop has: torch.get_num_threads(), or 1 within a parallel loop of torch's.
int64_t loop_threads();

// Calls worker() on this thread, and on up to threads - 1 others at the same time. The workers share out their work
// themselves, so that a worker that comes late finds none. The first exception of a worker is thrown here.
void run_in_threads(int64_t threads, c10::function_ref<void()> worker);

// Hands out units 0 .. count - 1, one at a time, to the threads; each thread has its own scratch. A unit's result does
// not depend on the thread. Without `neighbours`, a thread takes the first unit that is left. With `neighbours`, one
// thread should do neighbouring units one after the other: each thread begins with a share of its own, and then takes
// the units that are left in other shares.
template <class F>
void for_each_unit(int64_t count, double work, size_t scratch_bytes, F&& unit, bool neighbours = false) {
  const int64_t most = work < kSerialWork ? 1 : std::min(loop_threads(), count);
  const int64_t threads = std::max<int64_t>(most, 1), shares = neighbours ? threads : 1;
  c10::SmallVector<int64_t, 64> next(shares);
  for (int64_t i = 0; i < shares; ++i) next[i] = count * i / shares;
  std::atomic<int64_t> come = 0;
  const auto worker = [&] {
    const ThreadScratch<0> scratch(scratch_bytes);
    if (scratch_bytes >= sizeof(int64_t)) *static_cast<int64_t*>(scratch.data()) = 0;
    const int64_t thread = come++;
    for (int64_t t = thread; t < thread + shares; ++t) {
      const int64_t share = t % shares, end = count * (share + 1) / shares;
      for (int64_t i; (i = std::atomic_ref<int64_t>(next[share])++) < end;) unit(i, scratch.data());
    }
  };
  if (threads == 1)
    worker();
  else
    run_in_threads(threads, worker);
}

// The same for ranges of `grain` numbers of 0 .. count - 1: range(begin, end). A loop of one range stays on its thread.
template <class F>
void for_each_range(int64_t count, int64_t grain, F&& range) {
  const int64_t step = std::max<int64_t>(grain, 1), units = (count + step - 1) / step;
  for_each_unit(units, units > 1 ? kSerialWork : 0, 0,
                [&](int64_t i, void*) { range(i * step, std::min((i + 1) * step, count)); });
}

}  // namespace attnpack
