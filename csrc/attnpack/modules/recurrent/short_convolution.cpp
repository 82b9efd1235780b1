#include <attnpack/modules/recurrent/short_convolution.h>

#include <torch/nn/init.h>

#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/modules/detail/recurrent.h>
#include <attnpack/ops/causal_conv1d.h>

#include <cmath>

namespace attnpack {

void ShortConvolutionImpl::reset() {
  const auto channels = options.channels(), taps = options.kernel_size();
  check_size("channels", channels);
  check_size("kernel_size", taps);
  register_parameter("weight", allocate("channels and kernel_size", {channels, 1, taps}, weight, options.factory()));
  if (options.bias()) register_parameter("bias", allocate("channels", {channels}, bias, options.factory()));
  bind_members();
  if (weight.is_meta()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(taps));  // as torch's Conv1d
  torch::nn::init::uniform_(weight, -bound, bound);
  if (bias.defined()) torch::nn::init::uniform_(bias, -bound, bound);
}

void ShortConvolutionImpl::bind_members() {
  weight = parameters_["weight"];
  bias = options.bias() ? parameters_["bias"] : at::Tensor();
}

at::Tensor ShortConvolutionImpl::forward(const at::Tensor& x) {
  CausalConv1dOptions rest;
  if (bias.defined()) rest.bias(bias);
  return causal_conv1d(x, weight.squeeze(1), rest);
}

void ShortConvolutionImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::ShortConvolution", options);
}

void GatedConvolutionImpl::reset() {
  const auto& o = options;
  check_size("embed_dim", o.embed_dim());
  check_size("conv_kernel_size", o.conv_kernel_size());
  const auto linear = [&](int64_t in, int64_t out) {
    return Linear(LinearOptions(in, out).bias(o.bias()).factory(o.factory()));
  };
  conv = register_module(
      "conv", ShortConvolution(
                  ShortConvolutionOptions(o.embed_dim(), o.conv_kernel_size()).bias(o.bias()).factory(o.factory())));
  in_proj = register_module("in_proj", linear(o.embed_dim(), 3 * o.embed_dim()));
  out_proj = register_module("out_proj", linear(o.embed_dim(), o.embed_dim()));
}

at::Tensor GatedConvolutionImpl::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  check_input("x", x, options.embed_dim(), in_proj->weight);
  const StateShapes shapes{{options.embed_dim(), options.conv_kernel_size() - 1}, {}};
  return with_states("GatedConvolution", x, inputs, shapes, [&](const RecurrentInputs& given) -> Recurred {
    const auto bias = conv->bias.defined() ? std::make_optional(conv->bias) : std::nullopt;
    const auto [out, conv_state] = gated_convolution(in_proj(x), conv->weight, bias, given);
    return {out_proj(out), {conv_state, {}}};
  });
}

void GatedConvolutionImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::GatedConvolution", options);
}

}  // namespace attnpack
