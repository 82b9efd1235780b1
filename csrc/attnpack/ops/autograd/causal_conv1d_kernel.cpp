#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/autograd/saved_arguments.h>
#include <attnpack/ops/detail/causal_conv1d_arguments.h>
#include <attnpack/ops/detail/optional_tensor.h>

namespace attnpack {
namespace {

using torch::autograd::SavedVariable;

// Nothing is saved but the inputs: the backward pass computes the sums before the activation anew.
struct CausalConv1dBackward : torch::autograd::Node {
  CausalConv1dBackward(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args)
      : Node(torch::autograd::collect_next_edges(x, weight, args.bias, args.initial_state)),
        x_(x, false),
        weight_(weight, false),
        args_(args) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const Tensor x = x_.unpack(), weight = weight_.unpack();
    const CausalConv1dArguments args = args_.unpack();
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_symint(x.sym_sizes(), x.options());
    const std::optional<Tensor> grad_state = if_defined(grads[1]);
    auto [of_x, of_weight, of_bias, of_state] = causal_conv1d_backward_op(grad_out, grad_state, x, weight, args);
    return {of_x, of_weight, args.bias ? of_bias : Tensor(), args.initial_state ? of_state : Tensor()};
  }

  void release_variables() override {
    x_.reset_data();
    weight_.reset_data();
    args_.reset();
  }

  std::string name() const override { return "CausalConv1dBackward"; }

 private:
  SavedVariable x_, weight_;
  SavedArguments<CausalConv1dArguments> args_;
};

CausalConv1dResult causal_conv1d_autograd(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args) {
  const Tensor bias = or_undefined(args.bias), state = or_undefined(args.initial_state);
  const bool differentiable = torch::autograd::compute_requires_grad(x, weight, bias, state);
  // CUDA runs the formula anyway, so its gradients are those of the formula.
  if (wants_formula({&x, &weight, &bias, &state}) || (differentiable && x.is_cuda()))
    return causal_conv1d_formula(x, weight, args);
  CausalConv1dResult result;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    result = causal_conv1d_op(x, weight, args);
  }
  if (differentiable) {
    const auto node = make_node<CausalConv1dBackward>(x, weight, args);
    torch::autograd::set_history(std::get<0>(result), node);
    torch::autograd::set_history(std::get<1>(result), node);
  }
  return result;
}

CausalConv1dGradients causal_conv1d_backward_autograd(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                      const Tensor& x, const Tensor& weight,
                                                      const CausalConv1dArguments& args) {
  // The gradients of the formula can be differentiated again.
  if (torch::autograd::compute_requires_grad(grad_out, grad_state, x, weight, args.bias, args.initial_state))
    return causal_conv1d_backward_formula(grad_out, grad_state, x, weight, args);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return causal_conv1d_backward_op(grad_out, grad_state, x, weight, args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("causal_conv1d", attnpack::from_schema<attnpack::causal_conv1d_autograd>);
  m.impl("causal_conv1d_backward", attnpack::from_schema<attnpack::causal_conv1d_backward_autograd>);
}
