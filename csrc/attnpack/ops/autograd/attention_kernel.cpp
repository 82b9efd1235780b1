#include <torch/library.h>

#include <attnpack/ops/autograd/node.h>
#include <attnpack/ops/detail/attention_args.h>

namespace attnpack {
namespace {

using torch::autograd::SavedVariable;

// An optional tensor, saved.
class SavedOptional {
 public:
  explicit SavedOptional(const std::optional<Tensor>& t) : present_(t.has_value()) {
    if (present_) saved_ = SavedVariable(*t, false);
  }
  std::optional<Tensor> unpack() const { return present_ ? std::make_optional(saved_.unpack()) : std::nullopt; }
  void reset() { saved_.reset_data(); }

 private:
  bool present_;
  SavedVariable saved_;
};

struct AttentionBackward : torch::autograd::Node {
  AttentionBackward(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTENTION_PARAMS)
      : Node(torch::autograd::collect_next_edges(query, key, value, mask, sinks)),
        query_(query, false),
        key_(key, false),
        value_(value, false),
        mask_(mask),
        q_offsets_(q_offsets),
        kv_lens_(kv_lens),
        sinks_(sinks),
        alibi_slopes_(alibi_slopes),
        dropout_seed_(dropout_seed),
        causal_(causal),
        q_offset_(q_offset),
        window_left_(window_left),
        window_right_(window_right),
        softcap_(softcap),
        dropout_p_(dropout_p),
        scale_(scale) {
    if (head_map) head_map_ = head_map->vec();
  }

  void save_outputs(const Tensor& out, const Tensor& lse) {
    out_ = SavedVariable(out, true);
    lse_ = SavedVariable(lse, true);
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const Tensor query = query_.unpack(), out = out_.unpack(getptr()), lse = lse_.unpack(getptr());
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(out);
    const std::optional<Tensor> grad_lse = grads[1].defined() ? std::make_optional(grads[1]) : std::nullopt;
    at::OptionalIntArrayRef head_map;
    if (head_map_) head_map = *head_map_;
    const bool mask_gradient = task_should_compute_output(3), sinks_gradient = task_should_compute_output(4);
    auto [query_grad, key_grad, value_grad, mask_grad, sinks_grad] = attention_backward_op(
        grad_out, grad_lse, query, key_.unpack(), value_.unpack(), out, lse, mask_.unpack(), causal_, q_offset_,
        q_offsets_.unpack(), window_left_, window_right_, kv_lens_.unpack(), softcap_, sinks_.unpack(),
        alibi_slopes_.unpack(), head_map, dropout_p_, dropout_seed_.unpack(), scale_, mask_gradient, sinks_gradient);
    return {query_grad, key_grad, value_grad, mask_gradient ? mask_grad : Tensor(),
            sinks_gradient ? sinks_grad : Tensor()};
  }

  void release_variables() override {
    for (SavedVariable* saved : {&query_, &key_, &value_, &out_, &lse_}) saved->reset_data();
    for (SavedOptional* saved : {&mask_, &q_offsets_, &kv_lens_, &sinks_, &alibi_slopes_, &dropout_seed_})
      saved->reset();
  }

  std::string name() const override { return "AttentionBackward"; }

 private:
  SavedVariable query_, key_, value_, out_, lse_;
  SavedOptional mask_, q_offsets_, kv_lens_, sinks_, alibi_slopes_, dropout_seed_;
  bool causal_;
  c10::SymInt q_offset_;
  int64_t window_left_, window_right_;
  double softcap_;
  std::optional<std::vector<int64_t>> head_map_;
  double dropout_p_;
  std::optional<double> scale_;
};

AttentionResult attention_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                   ATTNPACK_ATTENTION_PARAMS) {
  const Tensor none;
  if (wants_formula({&query, &key, &value, mask ? &*mask : &none, sinks ? &*sinks : &none}))
    return attention_formula(query, key, value, ATTNPACK_ATTENTION_ARGS);
  const bool differentiable = torch::autograd::compute_requires_grad(query, key, value, mask, sinks);
  AttentionResult result;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    result = attention_op(query, key, value, ATTNPACK_ATTENTION_ARGS);
  }
  if (differentiable) {
    const auto node = make_node<AttentionBackward>(query, key, value, ATTNPACK_ATTENTION_ARGS);
    torch::autograd::set_history(std::get<0>(result), node);
    torch::autograd::set_history(std::get<1>(result), node);
    node->save_outputs(std::get<0>(result), std::get<1>(result));
  }
  return result;
}

AttentionGradients attention_backward_autograd(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                               const Tensor& query, const Tensor& key, const Tensor& value,
                                               const Tensor& out, const Tensor& lse, ATTNPACK_ATTENTION_PARAMS,
                                               bool mask_gradient, bool sinks_gradient) {
  AttentionGradients gradients;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    gradients = attention_backward_op(grad_out, grad_lse, query, key, value, out, lse, ATTNPACK_ATTENTION_ARGS,
                                      mask_gradient, sinks_gradient);
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
  m.impl("attention", attnpack::attention_autograd);
  m.impl("attention_backward", attnpack::attention_backward_autograd);
}
