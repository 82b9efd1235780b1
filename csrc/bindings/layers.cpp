#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/layer_tail.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/mixture_of_experts.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/rotary_embedding.h>
#include <bindings/common.h>
#include <bindings/register.h>
#include <bindings/rope_scaling.h>

namespace attnpack {

void register_layers(py::module_& m) {
  bind_unary<LinearImpl, LinearOptions, int64_t, int64_t>(m, "Linear", "x W^T + b.", "x");
  bind_unary<EmbeddingImpl, EmbeddingOptions, int64_t, int64_t>(m, "Embedding", "Rows of a table by token id.", "ids");
  bind_unary<RMSNormImpl, RMSNormOptions, int64_t>(m, "RMSNorm", "x / sqrt(mean(x^2) + eps) * weight.", "x");
  bind_unary<LayerNormImpl, LayerNormOptions, int64_t>(m, "LayerNorm",
                                                       "(x - mean) / sqrt(variance + eps) * weight + bias.", "x");
  bind_unary<FeedForwardImpl, FeedForwardOptions, int64_t, int64_t>(
      m, "FeedForward", "down(f(gate(x)) * up(x)), or down(f(up(x))).", "x");
  bind_unary<MixtureOfExpertsImpl, MixtureOfExpertsOptions, int64_t, int64_t, int64_t, int64_t>(
      m, "MixtureOfExperts", "Feed-forwards of which a gate chooses some for each token.", "x");

  auto tail = bind_module<LayerTailImpl>(m, "LayerTail", "The end of a layer, behind its feed-forward.");
  bind_options<LayerTailImpl, LayerTailOptions, int64_t>(tail);
  bind_method(tail, "forward", {"x", "input"}, 2, [](LayerTailImpl& self, Arguments& arguments) {
    const auto x = arguments.require<at::Tensor>("x");
    OptionalTensor input;
    arguments.read("input", input);
    arguments.finish();
    return without_gil([&] { return self.forward(x, input); });
  });
  auto table = bind_module<LayerInputTableImpl>(m, "LayerInputTable", "The inputs of the layers' tails.");
  bind_options<LayerInputTableImpl, LayerInputTableOptions, int64_t, int64_t, int64_t, int64_t>(table);
  bind_method(table, "forward", {"ids", "embedding"}, 2, [](LayerInputTableImpl& self, Arguments& arguments) {
    const auto ids = arguments.require<at::Tensor>("ids"), embedding = arguments.require<at::Tensor>("embedding");
    arguments.finish();
    return without_gil([&] { return self.forward(ids, embedding); });
  });

  auto rope = bind_module<RotaryEmbeddingImpl>(m, "RotaryEmbedding", "Rotary position embedding; no parameters.");
  bind_options<RotaryEmbeddingImpl, RotaryEmbeddingOptions, int64_t>(rope);
  bind_method(rope, "forward", {"x", "positions"}, 2, [](RotaryEmbeddingImpl& self, Arguments& arguments) {
    const auto x = arguments.require<at::Tensor>("x");
    OptionalTensor positions;
    arguments.read("positions", positions);
    arguments.finish();
    return without_gil([&] { return self.forward(x, positions); });
  });
  show_rope_settings(rope, [](const RotaryEmbeddingImpl& self) -> const RopeSettings& { return self.settings; });
}

}  // namespace attnpack
