#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include <attnpack/kernels.h>
#include <attnpack/kernels/attention_call.h>
#include <attnpack/kernels/table.h>
#include <attnpack/ops/cpu/work_units.h>
#include <attnpack/threads/share_units.h>
#include <attnpack/threads/thread_pool.h>
#include <attnpack/version.h>

namespace attnpack {
namespace {

const Isa* chosen_isa() {
  static const Isa* const isa = choose_isa(*attnpack_kernel_table(), std::getenv("ATTNPACK_ISA"));
  return isa;
}

// The CPUs that the process may use.
int64_t usable_cpus() {
#if defined(__linux__)
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) return CPU_COUNT(&cpus);
#endif
  return std::max<int64_t>(std::thread::hardware_concurrency(), 1);
}

// Calls worker() on the threads that the caller of the library gives. No exception leaves through its functions.
template <class Worker>
void run_on(const attnpack_threads& threads, int64_t count, const Worker& worker) {
  if (!threads.run) return run_with_helpers(count - 1, worker);
  struct Task {
    const Worker& worker;
    std::mutex mutex;
    std::exception_ptr error;
  } task{worker, {}, nullptr};
  const auto work = [](void* context) {
    auto& task = *static_cast<Task*>(context);
    try {
      task.worker();
    } catch (...) {
      const std::lock_guard lock(task.mutex);
      task.error = std::current_exception();
    }
  };
  threads.run(threads.runner, count, work, &task);
  if (task.error) std::rethrow_exception(task.error);
}

// Hands units to the caller's threads, as LoopThreads (ops/cpu/loop_threads.h) does to torch's.
struct CallersThreads {
  attnpack_threads threads;
  int64_t count() const {
    static const int64_t cpus = usable_cpus();
    return threads.count > 0 ? threads.count : cpus;
  }
  template <class F>
  void operator()(Order order, int64_t units, double work, size_t scratch_bytes, F&& unit) const {
    share_units(units, work, threads_of_loop(units, work, [&] { return count(); }), scratch_bytes, unit,
                order == Order::kNeighbours,
                [&](int64_t threads_used, const auto& worker) { run_on(threads, threads_used, worker); });
  }
};

// Calls f. Returns NULL, or why it failed, in memory of this thread.
template <class F>
const char* sentence_of(const F& f) {
  static thread_local std::string sentence;
  try {
    f();
    return nullptr;
  } catch (const Refused& refused) {
    sentence = refused.sentence;
  } catch (const std::exception& error) {
    sentence = std::string("attnpack: ") + error.what();
  }
  return sentence.c_str();
}

}  // namespace
}  // namespace attnpack

const char* attnpack_attention(const attnpack_attention_args* args, const attnpack_threads* threads) {
  using namespace attnpack;
  return sentence_of([&] {
    if (!args) throw Refused{"attnpack: args is NULL, wants the arguments: begin with attnpack_attention_defaults()"};
    if (threads && threads->count < 0)
      throw Refused{"attnpack: threads.count is below 0, wants a number, or 0 for all CPUs"};
    if (!chosen_isa())
      throw Refused{"attnpack: this CPU lacks the instruction set that ATTNPACK_ISA names: unset the variable"};
    const AttentionCall call(*args);
    if (call.calls().empty()) return;
    run_forward(chosen_isa()->kernels, call.calls(), CallersThreads{threads ? *threads : attnpack_threads{}});
  });
}

const char* attnpack_kernels_version(void) { return ATTNPACK_VERSION; }

const char* attnpack_kernels_instruction_set(void) {
  return attnpack::chosen_isa() ? attnpack::chosen_isa()->name : nullptr;
}
