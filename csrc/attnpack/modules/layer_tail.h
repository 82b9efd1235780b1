#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/leaf.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/part.h>
#include <attnpack/ops/option_list.h>

#include <optional>
#include <string>

namespace attnpack {

struct LayerTailOptions : OptionList<LayerTailOptions> {
  explicit LayerTailOptions(int64_t embed_dim) : embed_dim_(embed_dim) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(std::optional<int64_t>, input_dim);       // width of the layer's own input; none: there is none
  ATTNPACK_OPTION(std::string, activation) = "geglu_tanh";  // one with a gate, as in FeedForward
  ATTNPACK_OPTION(double, eps) = 1e-6;
  ATTNPACK_OPTION(Factory, factory);
};

// The tail of a layer of Gemma 4, behind its feed-forward: scalar * (x + norm(projection(f(gate(x)) * input))), or
// scalar * x without an input. The scalar [1] is 1 at first and frozen.
class LayerTailImpl : public LeafModule<LayerTailImpl>, public PartInterface {
 public:
  explicit LayerTailImpl(int64_t embed_dim) : LayerTailImpl(LayerTailOptions(embed_dim)) {}
  explicit LayerTailImpl(LayerTailOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x,                                     // [B, L, embed_dim]
                     const std::optional<at::Tensor>& input = std::nullopt);  // [B, L, input_dim]

  void reset() override;
  void bind_members() { scalar = parameters_["scalar"]; }
  void pretty_print(std::ostream& stream) const override;

  LayerTailOptions options;
  at::Tensor scalar;  // [1]
  Linear gate{nullptr}, projection{nullptr};
  RMSNorm norm{nullptr};
};
TORCH_MODULE(LayerTail);

struct LayerInputTableOptions : OptionList<LayerInputTableOptions> {
  LayerInputTableOptions(int64_t vocab_size, int64_t embed_dim, int64_t num_layers, int64_t input_dim)
      : vocab_size_(vocab_size), embed_dim_(embed_dim), num_layers_(num_layers), input_dim_(input_dim) {}
  ATTNPACK_OPTION(int64_t, vocab_size);
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_layers);
  ATTNPACK_OPTION(int64_t, input_dim);
  ATTNPACK_OPTION(double, eps) = 1e-6;
  ATTNPACK_OPTION(Factory, factory);
};

// The inputs of the layers' tails (Gemma 4): for each layer the mean, times sqrt(2), of
// norm(model_projection(embedding) / sqrt(embed_dim)) and of the token's row of embed_tokens, times sqrt(input_dim).
class LayerInputTableImpl : public torch::nn::Cloneable<LayerInputTableImpl>, public PartInterface {
 public:
  explicit LayerInputTableImpl(LayerInputTableOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& ids,         // int64 [B, L]
                     const at::Tensor& embedding);  // [B, L, embed_dim] -> [B, L, num_layers, input_dim]

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  LayerInputTableOptions options;
  Embedding embed_tokens{nullptr};
  Linear model_projection{nullptr};
  RMSNorm projection_norm{nullptr};
};
TORCH_MODULE(LayerInputTable);

}  // namespace attnpack
