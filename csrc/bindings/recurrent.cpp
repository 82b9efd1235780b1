#include <attnpack/modules/recurrent/gated_delta_net.h>
#include <attnpack/modules/recurrent/kimi_delta_attention.h>
#include <attnpack/modules/recurrent/linear_attention.h>
#include <attnpack/modules/recurrent/mamba2.h>
#include <attnpack/modules/recurrent/short_convolution.h>
#include <bindings/common.h>
#include <bindings/option_dicts.h>
#include <bindings/register.h>

namespace attnpack {

namespace {

template <typename Impl, typename Options, typename... Sizes>
void bind_recurrent(py::module_& m, const char* name, const char* doc, const Names& required = {}) {
  auto cls = bind_module<Impl>(m, name, doc);
  bind_options<Impl, Options, Sizes...>(cls, sizeof...(Sizes), required);
  bind_method(cls, "forward", {"x", "cache", "kv_lens", "cu_seqlens", "mask", "causal", "positions"}, 1,
              [](Impl& self, Arguments& arguments) {
                const auto x = arguments.require<at::Tensor>("x");
                AttentionInputs inputs;
                arguments.read_options(
                    inputs, {"context", "value_context", "kv_from", "index_cache", "key_index", "key_block"});
                arguments.finish();
                return without_gil([&] { return self.forward(x, inputs); });
              });
}

}  // namespace

void register_recurrent(py::module_& m) {
  bind_unary<ShortConvolutionImpl, ShortConvolutionOptions, int64_t, int64_t>(
      m, "ShortConvolution", "The causal convolution of each channel by itself.", "x");
  bind_unary<ForgetGateImpl, ForgetGateOptions, int64_t, int64_t, int64_t>(
      m, "ForgetGate", "The logits of the decays of a KimiDeltaAttention.", "x");
  bind_recurrent<GatedConvolutionImpl, GatedConvolutionOptions, int64_t>(
      m, "GatedConvolution", "LFM2's layer: a short convolution and a gate.");
  bind_recurrent<GatedDeltaNetImpl, GatedDeltaNetOptions, int64_t, int64_t, int64_t>(
      m, "GatedDeltaNet", "The delta rule with a decay for each head.", {"head_k_dim", "head_v_dim"});
  bind_recurrent<KimiDeltaAttentionImpl, KimiDeltaAttentionOptions, int64_t, int64_t>(
      m, "KimiDeltaAttention", "The delta rule with a decay for each channel.", {"head_dim"});
  bind_recurrent<LinearAttentionImpl, LinearAttentionOptions, int64_t, int64_t>(m, "LinearAttention",
                                                                                "Attention without the softmax.");
  bind_recurrent<Mamba2Impl, Mamba2Options, int64_t, int64_t>(
      m, "Mamba2", "Linear attention with a decay and a step size.", {"head_dim", "state_dim"});
}

}  // namespace attnpack
