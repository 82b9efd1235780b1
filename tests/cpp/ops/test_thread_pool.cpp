// The threads that help with loops. The program thread_pool_races runs this file under ThreadSanitizer too.
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <attnpack/threads/thread_pool.h>

namespace attnpack {
namespace {

// Adds the numbers 0 .. count - 1, each taken by one call of the task. Returns 0 if one was taken twice or never.
int64_t add_up(int64_t count, int64_t helpers) {
  std::vector<int> taken(count, 0);
  std::atomic<int64_t> next = 0, sum = 0;
  const auto task = [&] {
    for (int64_t i; (i = next++) < count;) {
      ++taken[i];
      sum += i;
    }
  };
  run_with_helpers(helpers, task);
  return std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; }) ? sum.load() : 0;
}
constexpr int64_t sum_below(int64_t count) { return count * (count - 1) / 2; }

// Waits until a condition holds, for 60 seconds at most, whatever the condition itself takes: on a busy machine that
// may be much more than the sleep.
template <class F>
bool comes_true(F&& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < end) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace

TEST_CASE("loops of every size are done once, whoever helps") {
  for (int64_t helpers : {0, 1, 3, 9})
    for (int64_t count : {2, 3, 40, 1000})
      for (int again = 0; again < 50; ++again) REQUIRE(add_up(count, helpers) == sum_below(count));
}

// How many threads meet in a loop that may have so many, after some milliseconds.
size_t count_threads(int64_t helpers) {
  std::mutex mutex;
  std::set<std::thread::id> seen;
  const auto meet = [&] {
    const std::unique_lock lock(mutex);
    seen.insert(std::this_thread::get_id());
  };
  const auto task = [&] {
    meet();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  };
  run_with_helpers(helpers, task);
  REQUIRE(seen.count(std::this_thread::get_id()) == 1);
  return seen.size();
}

TEST_CASE("threads do come to help, and no more than are asked for") {
  REQUIRE(comes_true([] {
    const size_t found = count_threads(2);
    REQUIRE(found <= 3);
    return found == 3;
  }));
}

// Waits for a helper that takes long, after which loops have no helper for 100 ms.
void wait_for_a_helper(std::chrono::milliseconds its_work) {
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> helped = false;
  const auto task = [&] {
    if (std::this_thread::get_id() == caller) {
      for (int i = 0; i < 100 && !helped; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else {
      helped = true;
      std::this_thread::sleep_for(its_work);
    }
  };
  REQUIRE(comes_true([&] {
    run_with_helpers(1, task);
    return helped.load();
  }));
}

TEST_CASE("after a long wait for a helper a loop has one fewer, and more again later") {
  REQUIRE(comes_true([] { return count_threads(1) == 2; }));
  wait_for_a_helper(std::chrono::milliseconds(300));
  REQUIRE(count_threads(1) == 1);
  REQUIRE(comes_true([] { return count_threads(1) == 2; }));
}

// Takes the core from a thread for longer than loops may wait, wherever the thread is.
void take_core(int) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(1500);
  while (std::chrono::steady_clock::now() < end) {
  }
}

TEST_CASE("a caller without helpers may lose its core at any place") {
  wait_for_a_helper(std::chrono::milliseconds(200));
  struct sigaction takes{}, before;
  takes.sa_handler = take_core;
  REQUIRE(sigaction(SIGALRM, &takes, &before) == 0);
  const itimerval every_two_ms{{0, 2000}, {0, 2000}}, never{};
  setitimer(ITIMER_REAL, &every_two_ms, nullptr);
  int calls = 0;
  const auto task = [&] { ++calls; };
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(90);
  int loops = 0;
  for (; std::chrono::steady_clock::now() < end; ++loops) run_with_helpers(1, task);
  setitimer(ITIMER_REAL, &never, nullptr);
  REQUIRE(sigaction(SIGALRM, &before, nullptr) == 0);
  REQUIRE(calls == loops);
  REQUIRE(add_up(1000, 1) == sum_below(1000));
}

TEST_CASE("a loop does not wait for helpers that do something else") {
  std::atomic<int> held = 0;
  std::atomic<bool> release = false;
  const auto holds = [&] {
    ++held;
    while (!release) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  // The helpers, and the thread that called them, wait here until the loop below has ended.
  std::thread other([&] { run_with_helpers(64, holds); });
  REQUIRE(comes_true([&] { return held >= 1; }));
  REQUIRE(add_up(1000, 64) == sum_below(1000));
  release = true;
  other.join();
}

TEST_CASE("many callers at once, more than there are loops") {
  std::vector<std::thread> callers;
  std::atomic<int> right = 0;
  for (int i = 0; i < 40; ++i)
    callers.emplace_back([&] {
      for (int again = 0; again < 30; ++again) right += add_up(200, 2) == sum_below(200);
    });
  for (std::thread& caller : callers) caller.join();
  REQUIRE(right == 40 * 30);
}

TEST_CASE("a loop within a loop stays on its thread") {
  std::atomic<int> right = 0, next = 0;
  const auto task = [&] {
    while (next++ < 20) {
      const auto self = std::this_thread::get_id();
      bool alone = true;
      const auto inner = [&] { alone = alone && std::this_thread::get_id() == self; };
      run_with_helpers(3, inner);
      right += alone;
    }
  };
  run_with_helpers(3, task);
  REQUIRE(right == 20);
}

TEST_CASE("the exception of a caller or of a helper reaches the caller, and the next loop runs") {
  for (bool of_helper : {false, true}) {
    const auto caller = std::this_thread::get_id();
    std::atomic<bool> thrown = false;
    const auto task = [&] {
      if ((std::this_thread::get_id() != caller) == of_helper) {
        thrown = true;
        throw std::runtime_error("no memory left");
      }
      for (int i = 0; i < 100 && !thrown; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    REQUIRE(comes_true([&] {
      try {
        run_with_helpers(1, task);
      } catch (const std::runtime_error& error) {
        return std::string(error.what()) == "no memory left";
      }
      return false;
    }));
    REQUIRE(add_up(100, 1) == sum_below(100));
  }
}

TEST_CASE("the child of a fork has helpers of its own") {
  REQUIRE(add_up(1000, 2) == sum_below(1000));
  const pid_t child = fork();
  if (child == 0) {
    bool right = true;
    for (int again = 0; again < 100; ++again) right = right && add_up(1000, 2) == sum_below(1000);
    _exit(right ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  REQUIRE(add_up(1000, 2) == sum_below(1000));
}

}  // namespace attnpack
