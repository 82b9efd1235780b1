// One rank of several processes, which find each other through a file: are attention and modules over parts of a
// sequence, shared models and checkpoints of shared modules near to those of one process?
// tests/distributed/test_cpp_processes.py builds it, and starts it as `processes RANK SIZE FILE`.
#include <attnpack/attnpack.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <iostream>

#include "shared_models.h"

int main(int, char** argv) {
  const int rank = std::stoi(argv[1]), size = std::stoi(argv[2]);
  try {
    const auto store = c10::make_intrusive<c10d::FileStore>(argv[3], size);
    const auto group = attnpack::distributed::gloo_group(store, rank, size, std::chrono::seconds(20));
    std::cout << "attention " << context_cases::all_are_near(group) << std::endl;
    std::cout << "difference " << context_cases::difference_is_said(group) << std::endl;
    std::cout << "modules " << context_modules::all_are_near(group) << std::endl;
    std::cout << "models " << shared_models::all_are_near(group) << std::endl;
    std::cout << "checkpoint " << context_modules::checkpoint_comes_back(group) << std::endl;
  } catch (const c10::Error& error) {
    std::cout << "error " << error.what_without_backtrace() << std::endl;
    return 1;
  }
}
