#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace attnpack {

// Undoes one replacement of a function of torch. Copies undo the same one. It may be dropped: then the replacement
// stays until the process ends.
class Replacement {
 public:
  Replacement() = default;
  // For the functions that replace; undo runs once.
  explicit Replacement(std::function<void()> undo) : undo_(std::make_shared<std::function<void()>>(std::move(undo))) {}
  // Does nothing if it was called before.
  void disable() {
    if (!enabled()) return;
    const auto undo = std::exchange(*undo_, nullptr);
    undo();
  }
  // Whether this replacement is in force, so whether disable was not called yet.
  bool enabled() const { return undo_ && *undo_; }

 private:
  std::shared_ptr<std::function<void()>> undo_;
};

// A replacement for a scope: const ReplacementGuard guard(enable_linear());
class ReplacementGuard {
 public:
  explicit ReplacementGuard(Replacement replacement) : replacement_(std::move(replacement)) {}
  ~ReplacementGuard() { replacement_.disable(); }
  ReplacementGuard(const ReplacementGuard&) = delete;
  ReplacementGuard& operator=(const ReplacementGuard&) = delete;

 private:
  Replacement replacement_;
};

// The calls of a replaced function since the last reset, in this process. A compiled graph counts once, when it is
// traced.
struct ReplacementReport {
  int64_t taken = 0;                                       // calls that ran on the operator
  std::vector<std::pair<std::string, int64_t>> passed_on;  // reason, calls
};

}  // namespace attnpack
