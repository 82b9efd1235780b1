#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/autograd/saved_arguments.h>
#include <attnpack/ops/detail/varlen_arguments.h>

namespace attnpack {
namespace {

using torch::autograd::SavedVariable;

struct AttentionVarlenBackward : torch::autograd::Node {
  AttentionVarlenBackward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                          const VarlenArguments& args)
      : Node(torch::autograd::collect_next_edges(query, key, value, args.sinks)),
        query_(query, false),
        key_(key, false),
        value_(value, false),
        cu_seqlens_q_(cu_seqlens_q, false),
        args_(args) {}

  void save_outputs(const Tensor& out, const Tensor& lse) {
    out_ = SavedVariable(out, true);
    lse_ = SavedVariable(lse, true);
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const Tensor query = query_.unpack(), out = out_.unpack(getptr()), lse = lse_.unpack(getptr());
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(out);
    const std::optional<Tensor> grad_lse = grads[1].defined() ? std::make_optional(grads[1]) : std::nullopt;
    const bool sinks_gradient = task_should_compute_output(3);
    auto [query_grad, key_grad, value_grad, sinks_grad] =
        attention_varlen_backward_op(grad_out, grad_lse, query, key_.unpack(), value_.unpack(), out, lse,
                                     cu_seqlens_q_.unpack(), args_.unpack(), sinks_gradient);
    return {query_grad, key_grad, value_grad, sinks_gradient ? sinks_grad : Tensor()};
  }

  void release_variables() override {
    for (SavedVariable* saved : {&query_, &key_, &value_, &cu_seqlens_q_, &out_, &lse_}) saved->reset_data();
    args_.reset();
  }

  std::string name() const override { return "AttentionVarlenBackward"; }

 private:
  SavedVariable query_, key_, value_, cu_seqlens_q_, out_, lse_;
  SavedArguments<VarlenArguments> args_;
};

// Raises if a pool of pages requires a gradient.
void check_paged_gradients(const Tensor& key, const Tensor& value) {
  const char* name = key.requires_grad() ? "key" : "value";
  ATTNPACK_CHECK(!key.requires_grad() && !value.requires_grad(), name,
                 " requires a gradient, which a pool of pages has none of: call it under torch.no_grad(), or pass ",
                 name, ".detach()");
}

AttentionResult attention_varlen_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const Tensor& cu_seqlens_q, const VarlenArguments& args) {
  const bool differentiable = torch::autograd::compute_requires_grad(query, key, value, args.sinks);
  const Tensor none;
  if (args.block_table && differentiable) check_paged_gradients(key, value);
  if (wants_formula({&query, &key, &value, args.sinks ? &*args.sinks : &none}))
    return attend_each_sequence(&attention_formula, query, key, value, cu_seqlens_q, args);
  // Keys in pages: calls of `attention` give the same bits, and know the gradients of query and sinks.
  if (differentiable && args.block_table) {
    constexpr c10::DispatchKeySet kTraced({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
    ATTNPACK_CHECK(!cu_seqlens_q.key_set().has_any(kTraced),
                   "query requires a gradient with block_table while a graph is traced, wants none: call it under ",
                   "torch.no_grad(), or outside of the compiled function");
    return attend_each_sequence(&attention_op, query, key, value, cu_seqlens_q, args);
  }
  AttentionResult result;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    result = attention_varlen_op(query, key, value, cu_seqlens_q, args);
  }
  if (differentiable) {
    const auto node = make_node<AttentionVarlenBackward>(query, key, value, cu_seqlens_q, args);
    torch::autograd::set_history(std::get<0>(result), node);
    torch::autograd::set_history(std::get<1>(result), node);
    node->save_outputs(std::get<0>(result), std::get<1>(result));
  }
  return result;
}

VarlenGradients attention_varlen_backward_autograd(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                                   const Tensor& query, const Tensor& key, const Tensor& value,
                                                   const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                                   const VarlenArguments& args, bool sinks_gradient) {
  // One call per sequence gives the same bits, and its gradients can be differentiated again.
  if (torch::autograd::compute_requires_grad(grad_out, grad_lse, query, key, value, args.sinks))
    return differentiate_each_sequence(grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, args,
                                       sinks_gradient);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return attention_varlen_backward_op(grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, args,
                                      sinks_gradient);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Autograd, m) {
  m.impl("attention_varlen", attnpack::from_schema<attnpack::attention_varlen_autograd>);
  m.impl("attention_varlen_backward", attnpack::from_schema<attnpack::attention_varlen_backward_autograd>);
}
