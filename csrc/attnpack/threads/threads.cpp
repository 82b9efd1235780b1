#include <attnpack/threads/threads.h>

#include <ATen/Parallel.h>
#include <pthread.h>

#include <chrono>
#include <limits>

#include <attnpack/threads/thread_pool.h>

// Two kinds of threads can help. Torch's (OpenMP's) are awake after torch's own loops, and nobody is faster on a quiet
// machine; but their loop ends only when each of them has run, and beside another process a thread waits for a core for
// some milliseconds. The helpers of thread_pool.h never keep a loop waiting; but they share a core with torch's
// threads, which go on looking for work for some milliseconds after a loop of torch's. So torch's threads are taken as
// long as they come in time. After they came late three times in a second, the helpers are taken for some seconds.
namespace attnpack {
namespace {

// In nanoseconds.
constexpr int64_t kLate = 1'000'000;         // longer than a sleeping thread takes to wake up on a quiet machine
constexpr int64_t kSoon = 1'000'000'000;     // a virtual machine stops for some milliseconds now and then
constexpr int64_t kWithout = 4'000'000'000;  // so that it costs little to find out that the machine is still busy

int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// Until then the helpers are taken.
std::atomic<int64_t> without_torchs{0};

// When torch's threads were late the last time, and the time before.
std::atomic<int64_t> late{-kSoon}, late_before{-kSoon};

void note_late(int64_t time) {
  if (time - late_before.exchange(late.exchange(time)) > kSoon) return;
  const int64_t end = time + kWithout;
  late = late_before = end;  // then one time more is enough
  without_torchs = end;
}

// OpenMP's loops hang in the child of a fork whose parent had such threads.
void always_without() { without_torchs = std::numeric_limits<int64_t>::max(); }
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, always_without);

}  // namespace

int64_t loop_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void run_in_threads(int64_t threads, c10::function_ref<void()> worker) {
  const int64_t begin = now();
  if (begin < without_torchs.load(std::memory_order_relaxed)) return run_with_helpers(threads - 1, worker);
  std::atomic<int64_t> last_came = begin;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const int64_t came = now();
    int64_t last = last_came.load(std::memory_order_relaxed);
    while (last < came && !last_came.compare_exchange_weak(last, came, std::memory_order_relaxed)) {
    }
    worker();
  });
  if (last_came - begin > kLate) note_late(last_came);
}

}  // namespace attnpack
