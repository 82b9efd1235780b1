#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// torch's scaled_dot_product_attention on the operator, for programs that call it: from Python, from C++
// (at::scaled_dot_product_attention) and in compiled graphs. Nothing is replaced before enable_sdpa is called.
namespace attnpack {

// Undoes one enable_sdpa. Copies undo the same one. It may be dropped: then the replacement stays until the process
// ends.
class Replacement {
 public:
  // Does nothing if it was called before.
  void disable();
  // Whether this replacement is in force, so whether disable was not called yet.
  bool enabled() const;

 private:
  friend Replacement enable_sdpa();
  std::shared_ptr<bool> enabled_;
};

// Replaces scaled_dot_product_attention for tensors on the CPU, and on CUDA devices where attnpack's kernels run. The
// meaning stays that of torch, with the gradients: causality is top-left, and an error is torch's own. There are two
// differences: an excluded key that holds NaN has no influence, and in torch's modules a row without keys attends
// nothing, where torch gives NaN. A call that the operator does not take is passed on to torch, and sdpa_report counts
// it. Calls may be nested; torch's own function comes back when each Replacement is disabled. Any thread may call it,
// but no thread may run attention meanwhile.
Replacement enable_sdpa();

// The same for a scope.
class SdpaGuard {
 public:
  SdpaGuard() : replacement_(enable_sdpa()) {}
  ~SdpaGuard() { replacement_.disable(); }
  SdpaGuard(const SdpaGuard&) = delete;
  SdpaGuard& operator=(const SdpaGuard&) = delete;

 private:
  Replacement replacement_;
};

bool sdpa_enabled();

struct ReplacementReport {
  int64_t taken = 0;                                       // calls that ran on the operator
  std::vector<std::pair<std::string, int64_t>> passed_on;  // reason, calls
};

// The calls since the last reset, in this process. A compiled graph counts once, when it is traced.
ReplacementReport sdpa_report();
void reset_sdpa_report();

}  // namespace attnpack
