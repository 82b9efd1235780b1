#include <torch/library.h>

#include <attnpack/ops/autograd/attention_nodes.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

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
  const Tensor none;
  if (wants_formula({&grad_out, grad_lse ? &*grad_lse : &none, &query, &key, &value, args.mask ? &*args.mask : &none,
                     args.sinks ? &*args.sinks : &none}))
    return attention_backward_formula(grad_out, grad_lse, query, key, value, args, mask_gradient, sinks_gradient);
  AttentionGradients gradients;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    gradients =
        attention_backward_op(grad_out, grad_lse, query, key, value, out, lse, args, mask_gradient, sinks_gradient);
  }
  if (torch::autograd::compute_requires_grad(grad_out, grad_lse, query, key, value, args.mask, args.sinks)) {
    const auto node =
        make_node<AttentionDoubleBackward>(grad_out, grad_lse, query, key, value, args, mask_gradient, sinks_gradient);
    auto& [a, b, c, d, e] = gradients;
    for (const Tensor* gradient : {&a, &b, &c, &d, &e}) torch::autograd::set_history(*gradient, node);
  }
  return gradients;
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("attention", attnpack::from_schema<attnpack::attention_autograd>);
  m.impl("attention_backward", attnpack::from_schema<attnpack::attention_backward_autograd>);
}
