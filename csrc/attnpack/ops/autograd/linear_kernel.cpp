#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/detail/onednn_linear.h>
#include <attnpack/ops/linear.h>

#include <algorithm>

namespace attnpack {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;

// x [..., columns] as [rows, columns]. The rows are counted, because reshape finds no -1 where there are no columns.
Tensor as_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  c10::SymInt rows = 1;
  for (const auto& size : x.sym_sizes().slice(0, x.dim() - 1)) rows = rows * size;
  return x.reshape_symint({rows, x.sym_size(-1)});
}

// grad^T input [out, in], by the faster kernel. It can be differentiated.
Tensor weight_gradient(const Tensor& grad, const Tensor& input) {
  if (!takes_onednn(grad.t(), input.t(), std::nullopt)) return grad.t().mm(input);
  return attnpack::linear(with_round_rows(grad).t(), with_round_rows(input).t());
}

// grad_input = grad weight, grad_weight = grad^T input, grad_bias = sum(grad). The products are linear layers too, so
// they take the faster kernel, and can be differentiated.
struct LinearBackward : torch::autograd::Node {
  LinearBackward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias)
      : Node(torch::autograd::collect_next_edges(input, weight, bias)) {
    if (weight.requires_grad()) input_ = SavedVariable(input, false);
    if (input.requires_grad()) weight_ = SavedVariable(weight, false);
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    Tensor input, weight, bias;
    if (!grads[0].defined()) return {input, weight, bias};
    const Tensor rows = as_rows(grads[0]);
    if (task_should_compute_output(0)) input = attnpack::linear(grads[0], weight_.unpack().t());
    if (task_should_compute_output(1)) weight = weight_gradient(rows, as_rows(input_.unpack()));
    if (task_should_compute_output(2)) bias = rows.sum(0);
    return {input, weight, bias};
  }

  void release_variables() override {
    input_.reset_data();
    weight_.reset_data();
  }
  std::string name() const override { return "LinearBackward"; }

 private:
  SavedVariable input_, weight_;
};

// Where torch's kernel is taken, its own derivatives are.
Tensor linear_autograd(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Tensor none;
  const bool differentiable = torch::autograd::compute_requires_grad(input, weight, bias);
  if (wants_formula({&input, &weight, bias ? &*bias : &none}) ||
      (differentiable && !will_take_few_rows(input, weight, bias) && !takes_onednn(input, weight, bias)))
    return linear_formula(input, weight, bias);
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    out = attnpack::linear(input, weight, bias);
  }
  if (differentiable) torch::autograd::set_history(out, make_node<LinearBackward>(input, weight, bias));
  return out;
}

bool without_derivatives(const Tensor& x) { return !wants_formula({&x}) && !torch::autograd::compute_requires_grad(x); }

std::vector<Tensor> linears_autograd(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  if (!without_derivatives(input) || !std::all_of(weights.begin(), weights.end(), without_derivatives) ||
      !std::all_of(biases.begin(), biases.end(), without_derivatives))
    return each_linear(linear_autograd, input, weights, biases);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return attnpack::linears(input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("linear", attnpack::linear_autograd);
  m.impl("linears", attnpack::linears_autograd);
}
