#pragma once

#include <attnpack/cache/quantized_cache.h>
#include <attnpack/modules/grouped_attention.h>
#include <attnpack/modules/latent_attention.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/mixture_of_experts.h>
#include <attnpack/modules/rotary_embedding.h>
#include <attnpack/modules/stack.h>

namespace attnpack {

// A layer's own settings. A setting that is not given is that of the model's options.
struct LayerSettings {
  TORCH_ARG(std::optional<Window>, window);  // {-1, -1} for none
  TORCH_ARG(std::optional<double>, rope_base);
  TORCH_ARG(std::optional<RopeScaling>, rope_scaling);
  TORCH_ARG(bool, rope) = true;     // false: no rotation in this layer
  TORCH_ARG(bool, experts) = true;  // false: the plain feed-forward in a model with experts

 public:
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    visit("window", self.window_);
    visit("rope_base", self.rope_base_);
    visit("rope_scaling", self.rope_scaling_);
    visit("rope", self.rope_);
    visit("experts", self.experts_);
  }
};

// Further options of all attention layers, as in GroupedQueryAttentionOptions.
struct ScoreSettings {
  TORCH_ARG(double, softcap) = 0.0;
  TORCH_ARG(bool, sinks) = false;
  TORCH_ARG(bool, alibi) = false;
  TORCH_ARG(std::optional<double>, scale);
  TORCH_ARG(std::optional<int64_t>, rope_dim);  // the first dims of a head that rotate; default all

 public:
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    visit("softcap", self.softcap_);
    visit("sinks", self.sinks_);
    visit("alibi", self.alibi_);
    visit("scale", self.scale_);
    visit("rope_dim", self.rope_dim_);
  }
};

struct CausalLMOptions {
  CausalLMOptions(int64_t vocab_size, int64_t embed_dim, int64_t num_layers, int64_t num_heads)
      : vocab_size_(vocab_size), embed_dim_(embed_dim), num_layers_(num_layers), num_heads_(num_heads) {}
  TORCH_ARG(int64_t, vocab_size);
  TORCH_ARG(int64_t, embed_dim);
  TORCH_ARG(int64_t, num_layers);
  TORCH_ARG(int64_t, num_heads);
  TORCH_ARG(std::optional<int64_t>, num_kv_heads);  // default num_heads
  TORCH_ARG(std::optional<int64_t>, head_dim);      // default embed_dim / num_heads
  TORCH_ARG(std::optional<int64_t>, hidden_dim);    // width of the feed-forward; default 4 * embed_dim
  TORCH_ARG(int64_t, max_positions) = 2048;
  TORCH_ARG(double, rope_base) = 10000.0;
  TORCH_ARG(std::optional<RopeScaling>, rope_scaling);
  TORCH_ARG(bool, rope_interleaved) = false;
  // Latent attention in every layer. These options give its ranks, head dims, path and latent_norm; the rest comes from
  // the model's options. num_kv_heads, head_dim, qk_norm, window and out_bias do not apply to it. bias means what it
  // means in MultiHeadLatentAttention.
  TORCH_ARG(std::optional<MultiHeadLatentAttentionOptions>, latent);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(bool, tie_embeddings) = false;
  TORCH_ARG(double, init_std) = 0.02;  // standard deviation of the new embedding, as in Llama and GPT-2
  TORCH_ARG(QkNorm, qk_norm);
  TORCH_ARG(std::optional<Window>, window);  // the window of every layer; "W tokens, its own included" is {W - 1, 0}
  TORCH_ARG(bool, bias) = false;             // biases on q, k and v
  TORCH_ARG(std::optional<bool>, out_bias);  // default: as bias
  TORCH_ARG(bool, mlp_bias) = false;
  TORCH_ARG(std::string, activation) = "swiglu";  // of the feed-forwards
  TORCH_ARG(std::string, norm) = "rms";           // kind and places of the norms, as in DecoderBlockOptions
  TORCH_ARG(std::optional<std::string>, layout);
  // "rope"; "learned", a table of max_positions rows that is added to the embeddings; "sinusoidal", the same with the
  // fixed rows of sinusoidal_positions; or "none".
  TORCH_ARG(std::string, position_embedding) = "rope";
  TORCH_ARG(double, embed_scale) = 1.0;    // factor on the embeddings
  TORCH_ARG(double, final_softcap) = 0.0;  // c > 0: logits become c * tanh(logit / c)
  // In training: dropout of the embeddings and of what each block adds, and that of the probabilities.
  TORCH_ARG(double, dropout) = 0.0;
  TORCH_ARG(double, attention_dropout) = 0.0;
  TORCH_ARG(std::optional<ScoreSettings>, scores);
  // A MixtureOfExperts in place of each feed-forward; its embed_dim is the model's.
  TORCH_ARG(std::optional<MixtureOfExpertsOptions>, experts);
  // One for each layer, where layers differ.
  TORCH_ARG(std::vector<LayerSettings>, layer_settings);
  TORCH_ARG(Factory, factory);

 public:
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    visit("vocab_size", self.vocab_size_);
    visit("embed_dim", self.embed_dim_);
    visit("num_layers", self.num_layers_);
    visit("num_heads", self.num_heads_);
    visit("num_kv_heads", self.num_kv_heads_);
    visit("head_dim", self.head_dim_);
    visit("hidden_dim", self.hidden_dim_);
    visit("max_positions", self.max_positions_);
    visit("rope_base", self.rope_base_);
    visit("rope_scaling", self.rope_scaling_);
    visit("rope_interleaved", self.rope_interleaved_);
    visit("latent", self.latent_);
    visit("eps", self.eps_);
    visit("tie_embeddings", self.tie_embeddings_);
    visit("init_std", self.init_std_);
    visit("qk_norm", self.qk_norm_);
    visit("window", self.window_);
    visit("bias", self.bias_);
    visit("out_bias", self.out_bias_);
    visit("mlp_bias", self.mlp_bias_);
    visit("activation", self.activation_);
    visit("norm", self.norm_);
    visit("layout", self.layout_);
    visit("position_embedding", self.position_embedding_);
    visit("embed_scale", self.embed_scale_);
    visit("final_softcap", self.final_softcap_);
    visit("dropout", self.dropout_);
    visit("attention_dropout", self.attention_dropout_);
    visit("scores", self.scores_);
    visit("experts", self.experts_);
    visit("layer_settings", self.layer_settings_);
    visit("factory", self.factory_);
  }
};

// The inputs of CausalLM::forward beside ids.
struct CausalLMInputs {
  TORCH_ARG(std::shared_ptr<ModelCache>, cache);
  TORCH_ARG(std::optional<at::Tensor>, mask);       // broadcastable to [B, Hq, L, keys], on top of causality
  TORCH_ARG(std::optional<at::Tensor>, positions);  // int64 [L] or [B, L], for RoPE
  TORCH_ARG(std::optional<at::Tensor>, lengths);    // valid tokens of each right-padded row of ids, [B]

 public:
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    visit("cache", self.cache_);
    visit("mask", self.mask_);
    visit("positions", self.positions_);
    visit("lengths", self.lengths_);
  }
};

// A decoder-only language model with the layers and names of Llama (Touvron et al. 2023), and those of its relatives by
// other options: CONTRIBUTING's "Add a model family" lists which. With tie_embeddings the embedding is the head too,
// and there is no lm_head.
class CausalLMImpl : public torch::nn::Cloneable<CausalLMImpl> {
 public:
  explicit CausalLMImpl(CausalLMOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& ids, const CausalLMInputs& inputs = {});  // [B, L] -> logits [B, L, V]
  // The states before the head, [B, L, E]. head maps any [..., E] to logits.
  at::Tensor hidden(const at::Tensor& ids, const CausalLMInputs& inputs = {});
  at::Tensor head(const at::Tensor& hidden);

  // Decoder block i; raises for an i beyond the last one.
  DecoderBlock layer(size_t i) const { return model->layer(i); }

  // Caches of the right shape for every layer: growing, or with room for max_len positions.
  std::shared_ptr<ModelCache> dynamic_cache() const;
  std::shared_ptr<ModelCache> static_cache(int64_t batch, int64_t max_len) const;
  // A SlidingWindowCache for each layer with a window (left, 0), for the others what dynamic_cache() gives.
  std::shared_ptr<ModelCache> sliding_cache() const;
  std::shared_ptr<ModelCache> quantized_cache(const QuantizedCacheOptions& cache) const;
  // A PagedCache for each layer, with pages of 16. Raises for latent attention.
  std::shared_ptr<ModelCache> paged_cache(int64_t batch, int64_t num_pages) const;

  // The settings of each layer, with those of the model's options where it has none of its own.
  std::vector<LayerSettings> resolved_layers() const;

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  CausalLMOptions options;
  Decoder model{nullptr};
  Linear lm_head{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(CausalLMInputs())})
};
TORCH_MODULE(CausalLM);

}  // namespace attnpack
