#pragma once

#include <torch/library.h>

#include <atomic>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <vector>

#include <attnpack/backend/replacement.h>

namespace attnpack {

using Registrations = std::vector<std::unique_ptr<torch::Library>>;

// Registers a kernel of an op of aten for some dispatch keys.
template <class Kernel>
void register_kernel(Registrations& registrations, const char* op, std::initializer_list<c10::DispatchKey> keys,
                     Kernel kernel) {
  for (const c10::DispatchKey key : keys) {
    registrations.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
    registrations.back()->impl(op, kernel);
  }
}

// Whether torch.func transforms the call, or a tensor has a forward-mode gradient. Undefined tensors have none.
bool is_transformed(at::TensorList tensors);

// A function of torch that can be replaced in the whole process. Its kernels are registered while a replacement is in
// force. Make it a leaked static: the dispatcher may be gone when the process destroys static objects.
class ReplaceableFunction {
 public:
  // reasons: why calls are passed on, for the report. Number 0 stands for the calls that are taken.
  ReplaceableFunction(void (*register_kernels)(Registrations&), std::vector<const char*> reasons);

  Replacement enable();
  bool enabled();
  // Counts a call; 0: the operator took it.
  void count_call(size_t reason) { counts_[reason].fetch_add(1, std::memory_order_relaxed); }
  ReplacementReport report() const;
  void reset_report();
  // The hook runs after the first enable (true) and after the last disable (false).
  void on_change(std::function<void(bool enabled)> changed);

 private:
  void change_number(int64_t by);

  void (*register_kernels_)(Registrations&);
  const std::vector<const char*> reasons_;
  std::vector<std::atomic<int64_t>> counts_;
  std::mutex mutex_;
  int64_t in_force_ = 0;
  Registrations registrations_;
  std::function<void(bool)> changed_;
};

}  // namespace attnpack
