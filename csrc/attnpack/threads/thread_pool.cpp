#include <attnpack/threads/thread_pool.h>

#include <pthread.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace attnpack {
namespace {

// How long a helper without work looks for some before it sleeps: longer than most pauses between two loops of a layer,
// because to wake a thread takes as long as a small loop.
constexpr auto kAwake = std::chrono::microseconds(200);
constexpr int kPauses = 64;  // between two looks at the clock

// A helper that loses its core in the middle of some work keeps its caller waiting for a time slice. After a wait this
// long, loops get one helper fewer, and one more again after a pause: on a machine whose cores are all taken the caller
// is faster without.
constexpr auto kLongWait = std::chrono::milliseconds(1);
constexpr auto kPause = std::chrono::milliseconds(100);

using Clock = std::chrono::steady_clock;
constexpr size_t kMostLoops = 16;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Set while this thread runs a task.
thread_local bool in_task = false;

// A loop that helpers can join while it has room.
class alignas(64) Loop {
 public:
  // For the caller: takes a loop that nobody uses, and gives it back.
  bool take() { return !taken_.load(std::memory_order_relaxed) && !taken_.exchange(true, std::memory_order_acquire); }
  void give_back() { taken_.store(false, std::memory_order_release); }

  void open(int64_t helpers, void (*task)(void*), void* context) {
    task_ = task;
    context_ = context;
    error_ = nullptr;
    failed_.store(false, std::memory_order_relaxed);
    state_.store(static_cast<uint64_t>(helpers), std::memory_order_release);
  }
  // Lets nobody in any more, and waits for those who came.
  void close() {
    state_.fetch_and(~kRoom, std::memory_order_relaxed);
    for (int i = 0; state_.load(std::memory_order_acquire) != 0; ++i) i < kPauses ? pause() : (void)sched_yield();
  }
  bool join() {
    uint64_t state = state_.load(std::memory_order_relaxed);
    while (state & kRoom)
      if (state_.compare_exchange_weak(state, state - 1 + kRunning, std::memory_order_acquire)) return true;
    return false;
  }
  void leave() { state_.fetch_sub(kRunning, std::memory_order_release); }

  void run() {
    in_task = true;
    try {
      task_(context_);
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    }
    in_task = false;
  }
  std::exception_ptr take_error() { return std::exchange(error_, nullptr); }

 private:
  static constexpr uint64_t kRunning = uint64_t{1} << 32, kRoom = kRunning - 1;
  std::atomic<uint64_t> state_{0};  // low half: how many may still join; high half: how many are running
  std::atomic<bool> taken_{false}, failed_{false};
  void (*task_)(void*) = nullptr;
  void* context_ = nullptr;
  std::exception_ptr error_;
};

class ThreadPool {
 public:
  void run(int64_t helpers, void (*task)(void*), void* context) {
    Loop* const loop = take_loop();
    if (!loop) return task(context);
    const Clock::time_point begin = Clock::now();
    helpers = welcome(helpers, begin);
    add_threads(helpers);
    loop->open(helpers, task, context);
    if (helpers > 0) wake(helpers);
    loop->run();
    const Clock::time_point end = Clock::now();
    loop->close();
    const auto waited = Clock::now() - end;
    // Without helpers it was the caller that lost its core.
    if (helpers > 0 && waited > kLongWait && 2 * waited > end - begin) welcome_fewer(helpers, end + waited);
    const std::exception_ptr error = loop->take_error();
    loop->give_back();
    if (error) std::rethrow_exception(error);
  }

 private:
  Loop* take_loop() {
    for (Loop& loop : loops_)
      if (loop.take()) return &loop;
    return nullptr;
  }

  // How many of the helpers a loop gets.
  int64_t welcome(int64_t helpers, Clock::time_point now) {
    int64_t most = most_helpers_.load(std::memory_order_relaxed);
    if (most >= helpers) return helpers;
    const int64_t time = now.time_since_epoch().count();
    int64_t again = more_at_.load(std::memory_order_relaxed);
    if (time < again || !more_at_.compare_exchange_strong(again, (now + kPause).time_since_epoch().count()))
      return most;
    most_helpers_.store(++most, std::memory_order_relaxed);
    return most;
  }
  void welcome_fewer(int64_t helpers, Clock::time_point now) {
    most_helpers_.store(helpers - 1, std::memory_order_relaxed);
    more_at_.store((now + kPause).time_since_epoch().count(), std::memory_order_relaxed);
  }

  // Threads are never joined: they sleep when the process ends.
  void add_threads(int64_t wanted) {
    if (threads_.load(std::memory_order_relaxed) >= wanted) return;
    const std::lock_guard lock(growing_);
    try {
      for (; threads_.load(std::memory_order_relaxed) < wanted; ++threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads: those that there are share the work.
    }
  }

  void wake(int64_t helpers) {
    bell_.fetch_add(1);
    const int64_t sleeping = sleeping_.load();
    if (sleeping > helpers)
      for (int64_t i = 0; i < helpers; ++i) bell_.notify_one();
    else if (sleeping > 0)
      bell_.notify_all();
  }

  void serve() {
    for (;;) {
      const uint32_t heard = bell_.load();
      if (help()) continue;
      if (stay_awake(heard)) continue;
      sleeping_.fetch_add(1);
      bell_.wait(heard);
      sleeping_.fetch_sub(1);
    }
  }

  bool help() {
    bool helped = false;
    for (Loop& loop : loops_) {
      if (!loop.join()) continue;
      loop.run();
      loop.leave();
      helped = true;
    }
    return helped;
  }

  // Whether the bell rings in time.
  bool stay_awake(uint32_t heard) const {
    const auto end = Clock::now() + kAwake;
    do {
      for (int i = 0; i < kPauses; ++i) {
        if (bell_.load(std::memory_order_relaxed) != heard) return true;
        pause();
      }
    } while (Clock::now() < end);
    return false;
  }

  std::array<Loop, kMostLoops> loops_;
  std::atomic<uint32_t> bell_{0};  // rings when a loop opens
  std::atomic<int64_t> sleeping_{0}, threads_{0};
  std::atomic<int64_t> most_helpers_{std::numeric_limits<int64_t>::max()}, more_at_{0};  // more_at_: Clock's ticks
  std::mutex growing_;
};

std::atomic<ThreadPool*> pool{nullptr};

// A child of a fork has none of the threads, and perhaps loops that they had joined: it begins with a pool of its own.
void begin_anew() {
  pool.store(new ThreadPool);
  in_task = false;
}

ThreadPool& shared_pool() {
  static const bool begun = [] {
    begin_anew();
    return pthread_atfork(nullptr, nullptr, begin_anew) == 0;
  }();
  (void)begun;
  return *pool.load(std::memory_order_relaxed);
}

}  // namespace

void run_with_helpers(int64_t helpers, void (*task)(void*), void* context) {
  if (helpers < 1 || in_task) return task(context);
  shared_pool().run(helpers, task, context);
}

}  // namespace attnpack
