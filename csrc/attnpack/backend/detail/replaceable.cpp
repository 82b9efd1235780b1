#include <attnpack/backend/detail/replaceable.h>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

namespace attnpack {

bool is_transformed(at::TensorList tensors) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& x) { return torch::autograd::isFwGradDefined(x); });
}

ReplaceableFunction::ReplaceableFunction(void (*register_kernels)(Registrations&), std::vector<const char*> reasons)
    : register_kernels_(register_kernels), reasons_(std::move(reasons)), counts_(reasons_.size()) {}

Replacement ReplaceableFunction::enable() {
  change_number(1);
  return Replacement([this] { change_number(-1); });
}

bool ReplaceableFunction::enabled() {
  const std::lock_guard lock(mutex_);
  return in_force_ > 0;
}

// The hook runs without the lock, because it may wait for Python.
void ReplaceableFunction::change_number(int64_t by) {
  std::function<void(bool)> changed;
  bool enabled = false;
  {
    const std::lock_guard lock(mutex_);
    const bool before = in_force_ > 0;
    in_force_ += by;
    enabled = in_force_ > 0;
    if (enabled == before) return;
    if (enabled)
      register_kernels_(registrations_);
    else
      registrations_.clear();
    changed = changed_;
  }
  if (changed) changed(enabled);
}

ReplacementReport ReplaceableFunction::report() const {
  ReplacementReport report;
  report.taken = counts_[0].load();
  for (size_t i = 1; i < counts_.size(); ++i)
    if (const int64_t calls = counts_[i].load()) report.passed_on.emplace_back(reasons_[i], calls);
  return report;
}

void ReplaceableFunction::reset_report() {
  for (auto& count : counts_) count = 0;
}

void ReplaceableFunction::on_change(std::function<void(bool)> changed) {
  const std::lock_guard lock(mutex_);
  changed_ = std::move(changed);
}

}  // namespace attnpack
