#include <attnpack/modules/recurrent/gated_delta_net.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/modules/detail/recurrent.h>

namespace attnpack {

void GatedDeltaNetImpl::reset() {
  const auto& o = options;
  check_size("embed_dim", o.embed_dim());
  check_size("num_k_heads", o.num_k_heads());
  check_size("num_v_heads", o.num_v_heads());
  ATTNPACK_CHECK(o.num_v_heads() % o.num_k_heads() == 0, "num_k_heads: got ", o.num_k_heads(),
                 ", which does not divide num_v_heads ", o.num_v_heads(),
                 "; take a divisor, because each serves as many heads of values");
  const auto keys = o.num_k_heads() * required_size("head_k_dim", o.head_k_dim());
  const auto values = o.num_v_heads() * required_size("head_v_dim", o.head_v_dim());
  check_size("conv_kernel_size", o.conv_kernel_size());
  check_eps("norm_eps", o.norm_eps());
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, Linear(LinearOptions(in, out).bias(false).factory(o.factory())));
  };
  const auto per_head = [&](const char* name, const at::Tensor& before) {
    return register_parameter(name, allocate("num_v_heads", {o.num_v_heads()}, before, o.factory()));
  };
  const at::NoGradGuard no_grad;
  conv1d = register_module(
      "conv1d",
      ShortConvolution(ShortConvolutionOptions(2 * keys + values, o.conv_kernel_size()).factory(o.factory())));
  set_first_steps_(per_head("dt_bias", dt_bias));
  log_of_uniform_(per_head("A_log", A_log), 0.01, 16);  // kept away from 0, whose log is -inf
  norm = register_module("norm", RMSNorm(RMSNormOptions(*o.head_v_dim()).eps(o.norm_eps()).factory(o.factory())));
  out_proj = linear("out_proj", values, o.embed_dim());
  in_proj_qkv = linear("in_proj_qkv", o.embed_dim(), 2 * keys + values);
  in_proj_z = linear("in_proj_z", o.embed_dim(), values);
  in_proj_b = linear("in_proj_b", o.embed_dim(), o.num_v_heads());
  in_proj_a = linear("in_proj_a", o.embed_dim(), o.num_v_heads());
  bind_members();
}

void GatedDeltaNetImpl::bind_members() { dt_bias = parameters_["dt_bias"], A_log = parameters_["A_log"]; }

at::Tensor GatedDeltaNetImpl::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  const auto& o = options;
  check_input("x", x, o.embed_dim(), in_proj_qkv->weight);
  const StateShapes shapes{{conv1d->options.channels(), o.conv_kernel_size() - 1},
                           {o.num_v_heads(), *o.head_k_dim(), *o.head_v_dim()}};
  return with_states("GatedDeltaNet", x, inputs, shapes, [&](const RecurrentInputs& given) -> Recurred {
    const auto made = forward_all(x, {in_proj_qkv.get(), in_proj_a.get(), in_proj_b.get(), in_proj_z.get()});
    const auto [out, conv, state] =
        delta_attend(made[0], made[1], made[2], made[3], {conv1d->weight, A_log, dt_bias, norm->weight},
                     {o.num_k_heads(), norm->options.eps(), "silu", o.allow_neg_eigval() ? 2.0 : 1.0}, given);
    return {out_proj(out), {conv, state}};
  });
}

void GatedDeltaNetImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::GatedDeltaNet", options);
}

}  // namespace attnpack
