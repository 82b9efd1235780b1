#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <attnpack/ops/autograd/attention_nodes.h>

namespace attnpack {

using torch::autograd::variable_list;

variable_list AttentionDoubleBackward::apply(variable_list&& grads) {
  // With create_graph the result hangs on the graph of the inputs, and can be differentiated once more.
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode enable(true);
  // Views, because one input may be a function of another, or the same tensor.
  const auto source = [&](const Tensor& x) {
    if (!x.defined() || !at::isFloatingType(x.scalar_type())) return x;
    return create_graph && x.requires_grad() ? x.view_as(x) : x.detach().set_requires_grad(true);
  };
  AttentionArguments args = args_.unpack();
  const auto given = [](const std::optional<Tensor>& x) { return x.value_or(Tensor()); };
  const variable_list sources{source(grad_out_.unpack()), source(grad_lse_.unpack()), source(query_.unpack()),
                              source(key_.unpack()),      source(value_.unpack()),    source(given(args.mask)),
                              source(given(args.sinks))};
  const auto& [grad_out, grad_lse, query, key, value, mask, sinks] =
      std::tie(sources[0], sources[1], sources[2], sources[3], sources[4], sources[5], sources[6]);
  if (mask.defined()) args.mask = mask;
  if (sinks.defined()) args.sinks = sinks;
  const auto [a, b, c, d, e] =
      attention_backward_formula(grad_out, grad_lse.defined() ? std::make_optional(grad_lse) : std::nullopt, query, key,
                                 value, args, mask_gradient_, sinks_gradient_);
  const variable_list gradients{a, b, c, d, e};
  variable_list outputs, upstream, inputs;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!grads[i].defined() || !gradients[i].requires_grad()) continue;
    outputs.push_back(gradients[i]);
    upstream.push_back(grads[i]);
  }
  variable_list result(sources.size());
  std::vector<size_t> wanted;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!task_should_compute_output(i)) continue;
    wanted.push_back(i);
    inputs.push_back(sources[i]);
  }
  if (outputs.empty() || inputs.empty()) return result;
  const variable_list found = torch::autograd::grad(outputs, inputs, upstream, /*retain_graph=*/create_graph,
                                                    create_graph, /*allow_unused=*/true);
  for (size_t i = 0; i < wanted.size(); ++i) result[wanted[i]] = found[i];
  return result;
}

}  // namespace attnpack
