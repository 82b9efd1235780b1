#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/autograd/saved_arguments.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

using torch::autograd::SavedVariable;

struct AttentionBackward : torch::autograd::Node {
  AttentionBackward(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionArguments& args)
      : Node(torch::autograd::collect_next_edges(query, key, value, args.mask, args.sinks)),
        query_(query, false),
        key_(key, false),
        value_(value, false),
        args_(args) {}

  void save_outputs(const Tensor& out, const Tensor& lse) {
    out_ = SavedVariable(out, true);
    lse_ = SavedVariable(lse, true);
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const Tensor query = query_.unpack(), out = out_.unpack(getptr()), lse = lse_.unpack(getptr());
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(out);
    const std::optional<Tensor> grad_lse = grads[1].defined() ? std::make_optional(grads[1]) : std::nullopt;
    const bool mask_gradient = task_should_compute_output(3), sinks_gradient = task_should_compute_output(4);
    auto [query_grad, key_grad, value_grad, mask_grad, sinks_grad] =
        attention_backward_op(grad_out, grad_lse, query, key_.unpack(), value_.unpack(), out, lse, args_.unpack(),
                              mask_gradient, sinks_gradient);
    return {query_grad, key_grad, value_grad, mask_gradient ? mask_grad : Tensor(),
            sinks_gradient ? sinks_grad : Tensor()};
  }

  void release_variables() override {
    for (SavedVariable* saved : {&query_, &key_, &value_, &out_, &lse_}) saved->reset_data();
    args_.reset();
  }

  std::string name() const override { return "AttentionBackward"; }

 private:
  SavedVariable query_, key_, value_, out_, lse_;
  SavedArguments<AttentionArguments> args_;
};

AttentionResult attention_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const AttentionArguments& args) {
  const Tensor none;
  if (wants_formula({&query, &key, &value, args.mask ? &*args.mask : &none, args.sinks ? &*args.sinks : &none}))
    return attention_formula(query, key, value, args);
  const bool differentiable = torch::autograd::compute_requires_grad(query, key, value, args.mask, args.sinks);
  AttentionResult result;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    result = attention_op(query, key, value, args);
  }
  if (differentiable) {
    const auto node = make_node<AttentionBackward>(query, key, value, args);
    torch::autograd::set_history(std::get<0>(result), node);
    torch::autograd::set_history(std::get<1>(result), node);
    node->save_outputs(std::get<0>(result), std::get<1>(result));
  }
  return result;
}

AttentionGradients attention_backward_autograd(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                               const Tensor& query, const Tensor& key, const Tensor& value,
                                               const Tensor& out, const Tensor& lse, const AttentionArguments& args,
                                               bool mask_gradient, bool sinks_gradient) {
  AttentionGradients gradients;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    gradients =
        attention_backward_op(grad_out, grad_lse, query, key, value, out, lse, args, mask_gradient, sinks_gradient);
  }
  if (torch::autograd::compute_requires_grad(grad_out, grad_lse, query, key, value)) {
    const auto& [a, b, c, d, e] = gradients;
    forbid_double_backward("attention", std::vector<Tensor>{grad_out, query, key, value}, {a, b, c, d, e});
  }
  return gradients;
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("attention", attnpack::from_schema<attnpack::attention_autograd>);
  m.impl("attention_backward", attnpack::from_schema<attnpack::attention_backward_autograd>);
}
