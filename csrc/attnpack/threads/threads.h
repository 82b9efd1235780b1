#pragma once

#include <c10/util/FunctionRef.h>

#include <attnpack/threads/share_units.h>

namespace attnpack {

// How many threads a loop has: torch.get_num_threads(), or 1 within a parallel loop of torch's.
int64_t loop_threads();

// Calls worker() on this thread, and on up to threads - 1 others at the same time. The workers share out their work
// themselves, so that a worker that comes late finds none. The first exception of a worker is thrown here.
void run_in_threads(int64_t threads, c10::function_ref<void()> worker);

// Hands out units 0 .. count - 1 to torch's threads: share_units says how.
template <class F>
void for_each_unit(int64_t count, double work, size_t scratch_bytes, F&& unit, bool neighbours = false) {
  share_units(count, work, threads_of_loop(count, work, loop_threads), scratch_bytes, unit, neighbours,
              [](int64_t threads, const auto& worker) { run_in_threads(threads, worker); });
}

// The same for ranges of `grain` numbers of 0 .. count - 1: range(begin, end). A loop of one range stays on its thread.
template <class F>
void for_each_range(int64_t count, int64_t grain, F&& range) {
  const int64_t step = std::max<int64_t>(grain, 1), units = (count + step - 1) / step;
  for_each_unit(units, units > 1 ? kSerialWork : 0, 0,
                [&](int64_t i, void*) { range(i * step, std::min((i + 1) * step, count)); });
}

}  // namespace attnpack
