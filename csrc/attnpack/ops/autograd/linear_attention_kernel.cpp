#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/autograd/saved_arguments.h>
#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/optional_tensor.h>

namespace attnpack {
namespace {

using torch::autograd::SavedVariable;

// Nothing is saved but the inputs: the backward pass computes the states anew.
struct LinearAttentionBackward : torch::autograd::Node {
  LinearAttentionBackward(const Tensor& query, const Tensor& key, const Tensor& value,
                          const LinearAttentionArguments& args)
      : Node(torch::autograd::collect_next_edges(query, key, value, args.log_decay, args.beta, args.initial_state)),
        query_(query, false),
        key_(key, false),
        value_(value, false),
        args_(args) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const Tensor query = query_.unpack(), key = key_.unpack(), value = value_.unpack();
    const LinearAttentionArguments args = args_.unpack();
    const Tensor grad_out =
        grads[0].defined() ? grads[0] : at::zeros_symint(linear_out_shape(query, value), query.options());
    const std::optional<Tensor> grad_state = if_defined(grads[1]);
    auto [q, k, v, g, b, s] = linear_attention_backward_op(grad_out, grad_state, query, key, value, args);
    return {q, k, v, args.log_decay ? g : Tensor(), args.beta ? b : Tensor(), args.initial_state ? s : Tensor()};
  }

  void release_variables() override {
    for (SavedVariable* saved : {&query_, &key_, &value_}) saved->reset_data();
    args_.reset();
  }

  std::string name() const override { return "LinearAttentionBackward"; }

 private:
  SavedVariable query_, key_, value_;
  SavedArguments<LinearAttentionArguments> args_;
};

LinearAttentionResult linear_attention_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                                const LinearAttentionArguments& args) {
  const Tensor g = or_undefined(args.log_decay), beta = or_undefined(args.beta),
               state = or_undefined(args.initial_state);
  const bool differentiable = torch::autograd::compute_requires_grad(query, key, value, g, beta, state);
  // CUDA runs the formula anyway, so its gradients are those of the formula.
  if (wants_formula({&query, &key, &value, &g, &beta, &state}) || (differentiable && query.is_cuda()))
    return linear_attention_formula(query, key, value, args);
  LinearAttentionResult result;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    result = linear_attention_op(query, key, value, args);
  }
  if (differentiable) {
    const auto node = make_node<LinearAttentionBackward>(query, key, value, args);
    torch::autograd::set_history(std::get<0>(result), node);
    torch::autograd::set_history(std::get<1>(result), node);
  }
  return result;
}

// A state that is written has no history.
Tensor linear_attention_in_place_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const Tensor& state, const OwnedStateArguments& args) {
  const Tensor g = or_undefined(args.log_decay), beta = or_undefined(args.beta);
  TORCH_CHECK(!wants_formula({&query, &key, &value, &state, &g, &beta}) &&
                  !torch::autograd::compute_requires_grad(query, key, value, state, g, beta),
              "attnpack: linear_attention_ writes the state in place and has no gradient, but a tensor wants one. ",
              "Compute under torch.no_grad(), or take linear_attention");
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    out = linear_attention_in_place_op(query, key, value, state, args);
  }
  if (!state.is_inference()) state.unsafeGetTensorImpl()->bump_version();
  return out;
}

LinearAttentionGradients linear_attention_backward_autograd(const Tensor& grad_out,
                                                            const std::optional<Tensor>& grad_state,
                                                            const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const LinearAttentionArguments& args) {
  // The gradients of the formula can be differentiated again.
  if (torch::autograd::compute_requires_grad(grad_out, grad_state, query, key, value, args.log_decay, args.beta,
                                             args.initial_state))
    return linear_attention_backward_formula(grad_out, grad_state, query, key, value, args);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return linear_attention_backward_op(grad_out, grad_state, query, key, value, args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("linear_attention", attnpack::from_schema<attnpack::linear_attention_autograd>);
  m.impl("linear_attention_", attnpack::from_schema<attnpack::linear_attention_in_place_autograd>);
  m.impl("linear_attention_backward", attnpack::from_schema<attnpack::linear_attention_backward_autograd>);
}
