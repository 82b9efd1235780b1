#include <attnpack/ops/cpu/machine_speed.h>

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include <attnpack/ops/cpu/isa.h>
#include <attnpack/threads/threads.h>

namespace attnpack {
namespace {

constexpr int kTries = 5;

// The work per second of do_work(thread), which all threads run at once. do_work returns how much it did.
template <class F>
double work_per_second(F&& do_work) {
  const int64_t threads = loop_threads();
  std::vector<double> work(threads, 0.0);
  const auto start = std::chrono::steady_clock::now();
  for_each_range(threads, 1, [&](int64_t t, int64_t) { work[t] = do_work(t); });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return std::accumulate(work.begin(), work.end(), 0.0) / seconds;
}

template <class F>
double best_of_tries(F&& measure) {
  double best = 0;
  for (int i = 0; i < kTries; ++i) best = std::max(best, measure());
  return best;
}

constexpr int64_t kApart = 16;  // floats: each thread writes to a cache line of its own

}  // namespace

int64_t last_level_cache_bytes() {
  std::map<std::string, int64_t> kibibytes;  // of each cache, by the CPUs that share it
  for (int64_t cpu = 0; cpu < sysconf(_SC_NPROCESSORS_CONF); ++cpu) {
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index3/";
    std::string cpus;
    // The size is such as 32768K.
    if (std::ifstream(folder + "shared_cpu_list") >> cpus) std::ifstream(folder + "size") >> kibibytes[cpus];
  }
  int64_t bytes = 0;
  for (const auto& [cpus, size] : kibibytes) bytes += size << 10;
  return bytes;
}

double read_bytes_per_second(const at::Tensor& data) {
  const float* from = data.const_data_ptr<float>();
  const int64_t share = data.numel() / loop_threads();
  std::vector<float> sink(loop_threads() * kApart);
  return work_per_second([&](int64_t t) {
    kernels_in_use().read_through(from + t * share, share, &sink[t * kApart]);
    return static_cast<double>(share) * sizeof(float);
  });
}

Limits measure_limits() {
  const auto& kernels = kernels_in_use();
  std::vector<float> sink(loop_threads() * kApart);
  const auto flops_of = [&](double (*multiply_adds)(int64_t, float*)) {
    return 2 * best_of_tries([&] {
             return work_per_second([&](int64_t t) { return multiply_adds(1 << 20, &sink[t * kApart]); });
           });
  };
  const double flops = flops_of(kernels.multiply_adds), pairs = flops_of(kernels.pair_multiply_adds);
  const int64_t bytes = std::max(int64_t{256} << 20, 2 * last_level_cache_bytes());
  const at::Tensor data = at::ones({bytes / static_cast<int64_t>(sizeof(float))}, at::kFloat);
  return {flops, pairs > 0 ? pairs : flops, best_of_tries([&] { return read_bytes_per_second(data); })};
}

}  // namespace attnpack
