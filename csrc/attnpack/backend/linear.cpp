#include <attnpack/backend/linear.h>

#include <ATen/ATen.h>
#include <ATen/ops/linear_native.h>
#include <torch/library.h>

#include <attnpack/backend/detail/hooks.h>
#include <attnpack/backend/detail/replaceable.h>
#include <attnpack/ops/detail/onednn_linear.h>
#include <attnpack/ops/linear.h>

namespace attnpack {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

enum class LinearReason { kNone, kAsFast, kTransform, kSubclass };

void register_linear(Registrations& registrations);

ReplaceableFunction& replaceable_linear() {
  static auto& function = *new ReplaceableFunction(
      register_linear,
      {"",
       "torch's kernel is as fast for the sizes, the dtype and the CPU, or ATTNPACK_LINEAR pins it, or the "
       "call is not for it",
       "a torch.func transform or forward-mode differentiation is active",
       "a tensor is of a class of its own, or a graph is exported"});
  return function;
}

LinearReason why_not(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  if (input.layout() != at::kStrided || input.is_nested() || weight.layout() != at::kStrided || weight.is_nested())
    return LinearReason::kAsFast;
  const Tensor given_bias = bias ? *bias : Tensor();
  if (is_transformed({input, weight, given_bias})) return LinearReason::kTransform;
  // Before the sizes are asked: a question about the sizes of a traced tensor is a promise of the graph.
  if (!takes_classes_of({input, weight, given_bias})) return LinearReason::kSubclass;
  if (!takes_onednn(input, weight, bias) && !will_take_few_rows(input, weight, bias)) return LinearReason::kAsFast;
  return LinearReason::kNone;
}

// The operator asks torch's linear for what it does not compute itself. Such calls come back here, and are passed on
// for the same reason.
Tensor replaced_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const LinearReason reason = why_not(input, weight, bias);
  replaceable_linear().count_call(static_cast<size_t>(reason));
  if (reason != LinearReason::kNone) return at::native::linear(input, weight, bias);
  return attnpack::linear(input, weight, bias);
}

void register_linear(Registrations& registrations) {
  register_kernel(registrations, "linear", {c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU},
                  TORCH_FN(replaced_linear));
}

}  // namespace

Replacement enable_linear() { return replaceable_linear().enable(); }
bool linear_enabled() { return replaceable_linear().enabled(); }
ReplacementReport linear_report() { return replaceable_linear().report(); }
void reset_linear_report() { replaceable_linear().reset_report(); }
void set_linear_hook(ChangeHook changed) { replaceable_linear().on_change(std::move(changed)); }

}  // namespace attnpack
