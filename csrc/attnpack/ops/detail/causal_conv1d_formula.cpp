#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <attnpack/ops/detail/causal_conv1d_arguments.h>
#include <attnpack/ops/detail/formula_gradients.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/sequences.h>

namespace attnpack {
namespace {

// Dense sequences of one length in the accumulation type: before [N, K - 1, C] stands before x [N, L, C].
Tensor convolve(const Tensor& before, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Tensor inputs = at::cat({before, x}, 1);
  Tensor out = at::zeros_like(x);
  for (int64_t k = 0; k < weight.size(1); ++k) out = out + inputs.narrow(1, k, x.size(1)) * weight.select(1, k);
  return bias.defined() ? out + bias : out;
}

}  // namespace

CausalConv1dResult causal_conv1d_formula(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args) {
  check_causal_conv1d(x, weight, args);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto wide = accumulation_type(x);
  const int64_t length = x.size(1), past = weight.size(1) - 1;
  const Tensor padding = args.kv_lens ? padding_of(*args.kv_lens, length).unsqueeze(-1) : Tensor();
  const auto without_padding = [&](const Tensor& t) { return padding.defined() ? t.masked_fill(padding, 0) : t; };
  const Tensor inputs = without_padding(x), taps = weight.to(wide), bias = args.bias ? args.bias->to(wide) : Tensor();
  // [N, K - 1, C]
  const Tensor before = args.initial_state
                            ? args.initial_state->to(x.scalar_type()).transpose(1, 2)
                            : at::zeros_symint(conv_state_shape(x, weight, args), x.options()).transpose(1, 2);
  Tensor out, last;
  if (!args.cu_seqlens) {
    out = convolve(before.to(wide), inputs.to(wide), taps, bias);
    const Tensor all = at::cat({before, inputs}, 1);
    if (args.kv_lens) {
      const Tensor rows = args.kv_lens->to(at::kLong).unsqueeze(1) + at::arange(past, args.kv_lens->options());
      last = all.gather(1, rows.to(at::kLong).unsqueeze(-1).expand({-1, -1, x.size(2)}));
    } else {
      last = all.narrow(1, length, past);
    }
  } else {
    const std::vector<int64_t> ends = read_ends(*args.cu_seqlens, length, "x");
    std::vector<Tensor> outs{inputs.to(wide).narrow(1, 0, 0)}, states{before.narrow(0, 0, 0)};
    for (size_t n = 0; n + 1 < ends.size(); ++n) {
      const Tensor part = inputs.narrow(1, ends[n], ends[n + 1] - ends[n]),
                   past_inputs = before.narrow(0, static_cast<int64_t>(n), 1);
      outs.push_back(convolve(past_inputs.to(wide), part.to(wide), taps, bias));
      states.push_back(at::cat({past_inputs, part}, 1).narrow(1, part.size(1), past));
    }
    out = at::cat(outs, 1), last = at::cat(states, 0);
  }
  if (args.silu) out = at::silu(out);
  return {laid_as_rows(x, without_padding(out).to(x.scalar_type())), last.contiguous().transpose(1, 2)};
}

CausalConv1dGradients causal_conv1d_backward_formula(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                                     const Tensor& x, const Tensor& weight,
                                                     const CausalConv1dArguments& args) {
  check_causal_conv1d_backward(grad_out, grad_state, x, weight, args);
  std::vector<Tensor> inputs{x, weight};
  for (const auto* given : {&args.bias, &args.initial_state})
    if (*given) inputs.push_back(**given);
  const auto formula = [&](const std::vector<Tensor>& sources) {
    CausalConv1dArguments from = args;
    size_t i = 2;
    for (auto* given : {&from.bias, &from.initial_state})
      if (*given) *given = sources[i++];
    return causal_conv1d_formula(sources[0], sources[1], from);
  };
  const std::vector<Tensor> found = gradients_of_formula(formula, inputs, grad_out, grad_state);
  const auto none = [&] { return at::empty({0}, x.options()); };
  return {laid_as_rows(x, found[0]), found[1].contiguous(), args.bias ? found[2].contiguous() : none(),
          args.initial_state ? laid_as_conv_state(found.back()) : none()};
}

}  // namespace attnpack
