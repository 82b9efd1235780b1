#include <attnpack/modules/recurrent/kimi_delta_attention.h>

#include <ATen/ATen.h>

#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/modules/detail/recurrent.h>

namespace attnpack {

namespace {

template <typename Options>
Linear linear(const Options& o, int64_t in, int64_t out) {
  return Linear(LinearOptions(in, out).bias(false).factory(o.factory()));
}

}  // namespace

void ForgetGateImpl::reset() {
  const auto& o = options;
  const auto width = o.num_heads() * o.head_dim();
  const at::NoGradGuard no_grad;
  f_a_proj = register_module("f_a_proj", linear(o, o.embed_dim(), o.head_dim()));
  f_b_proj = register_module("f_b_proj", linear(o, o.head_dim(), width));
  set_first_steps_(register_parameter("dt_bias", allocate("num_heads, head_dim", {width}, dt_bias, o.factory())));
  log_of_uniform_(register_parameter("A_log", allocate("num_heads", {1, 1, o.num_heads(), 1}, A_log, o.factory())), 1,
                  16);
  bind_members();
}

void ForgetGateImpl::bind_members() { dt_bias = parameters_["dt_bias"], A_log = parameters_["A_log"]; }

at::Tensor ForgetGateImpl::forward(const at::Tensor& x) { return f_b_proj(f_a_proj(x)); }

void ForgetGateImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::ForgetGate", options);
}

void KimiDeltaAttentionImpl::reset() {
  const auto& o = options;
  check_size("embed_dim", o.embed_dim());
  check_size("num_heads", o.num_heads());
  const auto dim = required_size("head_dim", o.head_dim()), width = o.num_heads() * dim;
  check_size("conv_kernel_size", o.conv_kernel_size());
  check_eps("norm_eps", o.norm_eps());
  const auto child = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, linear(o, in, out));
  };
  q_proj = child("q_proj", o.embed_dim(), width);
  k_proj = child("k_proj", o.embed_dim(), width);
  v_proj = child("v_proj", o.embed_dim(), width);
  conv1d = register_module(
      "conv1d", ShortConvolution(ShortConvolutionOptions(3 * width, o.conv_kernel_size()).factory(o.factory())));
  forget_gate = register_module("forget_gate",
                                ForgetGate(ForgetGateOptions(o.embed_dim(), o.num_heads(), dim).factory(o.factory())));
  b_proj = child("b_proj", o.embed_dim(), o.num_heads());
  g_a_proj = child("g_a_proj", o.embed_dim(), dim);
  g_b_proj = child("g_b_proj", dim, width);
  o_norm = register_module("o_norm", RMSNorm(RMSNormOptions(dim).eps(o.norm_eps()).factory(o.factory())));
  o_proj = child("o_proj", width, o.embed_dim());
}

at::Tensor KimiDeltaAttentionImpl::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  const auto& o = options;
  check_input("x", x, o.embed_dim(), q_proj->weight);
  const StateShapes shapes{{conv1d->options.channels(), o.conv_kernel_size() - 1},
                           {o.num_heads(), *o.head_dim(), *o.head_dim()}};
  return with_states("KimiDeltaAttention", x, inputs, shapes, [&](const RecurrentInputs& given) -> Recurred {
    const auto made = forward_all(x, {q_proj.get(), k_proj.get(), v_proj.get(), b_proj.get()});
    const auto [out, conv, state] =
        delta_attend(at::cat({made[0], made[1], made[2]}, -1), forget_gate(x), made[3], g_b_proj(g_a_proj(x)),
                     {conv1d->weight, forget_gate->A_log, forget_gate->dt_bias, o_norm->weight},
                     {o.num_heads(), o_norm->options.eps(), "sigmoid"}, given);
    return {o_proj(out), {conv, state}};
  });
}

void KimiDeltaAttentionImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::KimiDeltaAttention", options);
}

}  // namespace attnpack
