#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <attnpack/threads/scratch.h>

// How threads share out the units of a loop. No headers of torch.
namespace attnpack {

// Below this many multiply-adds a call stays on its thread.
constexpr double kSerialWork = 1 << 17;

// How many threads a loop of `count` units takes, of the threads() that there are.
template <class Threads>
int64_t threads_of_loop(int64_t count, double work, const Threads& threads) {
  const int64_t most = work < kSerialWork ? 1 : std::min(threads(), count);
  return std::max<int64_t>(most, 1);
}

// A thread takes several units of its share at once, half of those that are left, as long as they are no more work than
// this: to take some is an atomic instruction, which waits for the loads before it.
constexpr double kTakenWork = 1 << 19;

// Takes some of the units before `end`, at most `most` of them. Returns how many, and where they begin.
inline int64_t take_units(std::atomic_ref<int64_t> next, int64_t end, int64_t most, int64_t& begin) {
  begin = next.load(std::memory_order_relaxed);
  for (int64_t some; begin < end;) {
    some = std::clamp<int64_t>((end - begin) / 2, 1, most);
    if (next.compare_exchange_weak(begin, begin + some, std::memory_order_relaxed)) return some;
  }
  return 0;
}

// Hands out units 0 .. count - 1, together `work` multiply-adds, to the threads; each thread has its own scratch. A
// unit's result does not depend on the thread. Without `neighbours`, a thread takes the first units that are left. With
// `neighbours`, one thread should do neighbouring units one after the other: each thread begins with a share of its
// own, and then takes the units that are left in other shares. run(threads, worker) calls worker() on as many threads
// at the same time, on one if no others come.
template <class Unit, class Run>
void share_units(int64_t count, double work, int64_t threads, size_t scratch_bytes, Unit&& unit, bool neighbours,
                 Run&& run) {
  const auto begin_scratch = [&](const ThreadScratch<0>& scratch) {
    if (scratch_bytes >= sizeof(int64_t)) *static_cast<int64_t*>(scratch.data()) = 0;
    return scratch.data();
  };
  if (threads == 1) {
    const ThreadScratch<0> scratch(scratch_bytes);
    void* const memory = begin_scratch(scratch);
    for (int64_t i = 0; i < count; ++i) unit(i, memory);
    return;
  }
  const double taken = neighbours ? kTakenWork * static_cast<double>(count) / work : 1;
  const int64_t most = std::max<int64_t>(static_cast<int64_t>(taken), 1);
  constexpr int64_t kFew = 64;  // of so many shares the counters need no memory of their own
  const int64_t shares = neighbours ? threads : 1;
  int64_t few[kFew];
  std::vector<int64_t> many(shares > kFew ? shares : 0);
  int64_t* const next = shares > kFew ? many.data() : few;
  for (int64_t i = 0; i < shares; ++i) next[i] = count * i / shares;
  std::atomic<int64_t> come = 0;
  const auto worker = [&] {
    const ThreadScratch<0> scratch(scratch_bytes);
    void* const memory = begin_scratch(scratch);
    const int64_t thread = come++;
    for (int64_t t = thread; t < thread + shares; ++t) {
      const int64_t share = t % shares, end = count * (share + 1) / shares;
      for (int64_t i, some; (some = take_units(std::atomic_ref<int64_t>(next[share]), end, most, i)) > 0;)
        for (; some > 0; --some) unit(i++, memory);
    }
  };
  run(threads, worker);
}

}  // namespace attnpack
