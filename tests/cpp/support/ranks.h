#pragma once

// Several processes, each of which is a thread here: a rank with a group of its own.
#include <attnpack/distributed/group.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace ranks {

using attnpack::distributed::Group;

// The result of program(group) on each rank, or its error.
template <typename Program>
std::vector<std::string> on_ranks(int size, const Program& program) {
  // torch's record of collectives is one per process, and torch 2.11 writes it without a lock.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> results(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        results[rank] = program(attnpack::distributed::gloo_group(store, rank, size, std::chrono::seconds(20)));
      } catch (const c10::Error& error) {
        results[rank] = error.what_without_backtrace();
      } catch (const std::exception& error) {
        results[rank] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return results;
}

inline bool contains(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

// "near", or how far two tensors are from each other.
inline std::string compared(const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs) {
  for (const auto& [got, wanted] : pairs) {
    if (got.sizes() != wanted.sizes()) return "shapes differ";
    if (!at::allclose(got, wanted, 1e-5, 1e-5, /*equal_nan=*/true))
      return "distance " + std::to_string((got - wanted).abs().max().item<double>());
  }
  return "near";
}

// Numbers that are the same on all ranks: threads share torch's generator.
inline at::Tensor draw(at::IntArrayRef sizes, int64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator);
}

// Threads that are ranks share torch's generator. One mutex for all instances of `made`, so that no two draw at a time.
inline std::mutex one_draws;

// A module with the same weights on all ranks.
template <typename Make>
auto made(const Make& make) {
  const std::lock_guard<std::mutex> lock(one_draws);
  torch::manual_seed(0);
  auto module = make();
  const at::NoGradGuard no_grad;
  for (auto& parameter : module->parameters()) parameter.normal_(0, 0.2);  // biases, norms and sinks that matter
  return module;
}

}  // namespace ranks
