#include <attnpack/ops/cpu/limits.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include <attnpack/ops/cpu/isa.h>

namespace attnpack {
namespace {

constexpr int kTries = 5;

// Most work a second of call(thread), done by all threads at once; call returns its work.
template <class F>
double best_rate(int64_t threads, F&& call) {
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    std::vector<double> work(threads, 0.0);
    const auto start = std::chrono::steady_clock::now();
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) work[t] = call(t);
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    double sum = 0;
    for (const double done : work) sum += done;
    best = std::max(best, sum / seconds);
  }
  return best;
}

}  // namespace

int64_t last_level_cache_bytes() {
#ifdef _SC_LEVEL3_CACHE_SIZE
  return std::max<int64_t>(0, sysconf(_SC_LEVEL3_CACHE_SIZE));
#else
  return 0;
#endif
}

Limits measure_limits() {
  const auto& kernels = kernels_in_use();
  const int64_t threads = at::get_num_threads();
  std::vector<float> sink(threads * 16);  // a cache line each
  const auto flops_of = [&](double (*multiply_adds)(int64_t, float*)) {
    return 2 * best_rate(threads, [&](int64_t t) { return multiply_adds(1 << 20, &sink[t * 16]); });
  };
  const double flops = flops_of(kernels.multiply_adds), pairs = flops_of(kernels.pair_multiply_adds);
  const int64_t count =
      std::max(int64_t{256} << 20, 2 * last_level_cache_bytes()) / static_cast<int64_t>(sizeof(float));
  const at::Tensor data = at::ones({count}, at::kFloat);
  const int64_t share = count / threads;
  const double bytes = best_rate(threads, [&](int64_t t) {
    kernels.read_through(data.const_data_ptr<float>() + t * share, share, &sink[t * 16]);
    return static_cast<double>(share) * sizeof(float);
  });
  return {flops, pairs > 0 ? pairs : flops, bytes};
}

}  // namespace attnpack
