#include <attnpack/modules/recurrent/mamba2.h>

#include <ATen/ATen.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/modules/detail/recurrent.h>

namespace attnpack {

void Mamba2Impl::reset() {
  const auto& o = options;
  check_size("embed_dim", o.embed_dim());
  check_size("num_heads", o.num_heads());
  check_size("num_groups", o.num_groups());
  ATTNPACK_CHECK(o.num_heads() % o.num_groups() == 0, "num_groups: got ", o.num_groups(),
                 ", which does not divide num_heads ", o.num_heads(),
                 "; take a divisor, because each serves as many heads");
  const auto width = o.num_heads() * required_size("head_dim", o.head_dim());
  const auto channels = width + 2 * o.num_groups() * required_size("state_dim", o.state_dim());
  check_size("conv_kernel_size", o.conv_kernel_size());
  check_eps("norm_eps", o.norm_eps());
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, Linear(LinearOptions(in, out).bias(o.bias()).factory(o.factory())));
  };
  const auto per_head = [&](const char* name, const at::Tensor& before) {
    return register_parameter(name, allocate("num_heads", {o.num_heads()}, before, o.factory()));
  };
  const at::NoGradGuard no_grad;
  conv1d = register_module(
      "conv1d", ShortConvolution(
                    ShortConvolutionOptions(channels, o.conv_kernel_size()).bias(o.conv_bias()).factory(o.factory())));
  in_proj = linear("in_proj", o.embed_dim(), width + channels + o.num_heads());
  set_first_steps_(per_head("dt_bias", dt_bias));
  log_of_uniform_(per_head("A_log", A_log), 1, 16);
  norm = register_module("norm", RMSNorm(RMSNormOptions(width).eps(o.norm_eps()).factory(o.factory())));
  per_head("D", D).fill_(1);
  out_proj = linear("out_proj", width, o.embed_dim());
  bind_members();
}

void Mamba2Impl::bind_members() {
  dt_bias = parameters_["dt_bias"], A_log = parameters_["A_log"], D = parameters_["D"];
}

at::Tensor Mamba2Impl::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  const auto& o = options;
  check_input("x", x, o.embed_dim(), in_proj->weight);
  const StateShapes shapes{{conv1d->options.channels(), o.conv_kernel_size() - 1},
                           {o.num_heads(), *o.state_dim(), *o.head_dim()}};
  return with_states("Mamba2", x, inputs, shapes, [&](const RecurrentInputs& given) -> Recurred {
    const auto conv_bias = conv1d->bias.defined() ? std::make_optional(conv1d->bias) : std::nullopt;
    const auto [out, conv, state] =
        state_space_attend(in_proj(x), {conv1d->weight, conv_bias, A_log, dt_bias, D, norm->weight},
                           {o.num_groups(), norm->options.eps()}, given);
    return {out_proj(out), {conv, state}};
  });
}

void Mamba2Impl::pretty_print(std::ostream& stream) const { print_options(stream, "attnpack::Mamba2", options); }

}  // namespace attnpack
