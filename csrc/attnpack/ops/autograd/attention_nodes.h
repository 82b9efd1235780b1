#pragma once

#include <vector>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/autograd/saved_arguments.h>
#include <attnpack/ops/detail/attention_arguments.h>

namespace attnpack {

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

// The derivative of AttentionBackward, which differentiates the formula of the gradients. The kernel has computed
// these, so that they have the same bits with and without create_graph.
struct AttentionDoubleBackward : torch::autograd::Node {
  AttentionDoubleBackward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query,
                          const Tensor& key, const Tensor& value, const AttentionArguments& args, bool mask_gradient,
                          bool sinks_gradient)
      : Node(torch::autograd::collect_next_edges(grad_out, grad_lse, query, key, value, args.mask, args.sinks)),
        grad_out_(grad_out, false),
        grad_lse_(grad_lse ? SavedVariable(*grad_lse, false) : SavedVariable()),
        query_(query, false),
        key_(key, false),
        value_(value, false),
        args_(args),
        mask_gradient_(mask_gradient),
        sinks_gradient_(sinks_gradient) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;

  void release_variables() override {
    for (SavedVariable* saved : {&grad_out_, &grad_lse_, &query_, &key_, &value_}) saved->reset_data();
    args_.reset();
  }

  std::string name() const override { return "AttentionDoubleBackward"; }

 private:
  SavedVariable grad_out_, grad_lse_, query_, key_, value_;
  SavedArguments<AttentionArguments> args_;
  bool mask_gradient_, sinks_gradient_;
};

}  // namespace attnpack
