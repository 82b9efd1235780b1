#pragma once

#include <attnpack/cache/quantized_cache.h>
#include <attnpack/modules/attention/grouped_attention.h>
#include <attnpack/modules/attention/latent_attention.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/mixture_of_experts.h>
#include <attnpack/modules/rotary_embedding.h>
#include <attnpack/modules/stack.h>
#include <attnpack/ops/option_list.h>

#include <functional>

namespace attnpack {

// A layer's own settings. A setting that is not given is that of the model's options.
struct LayerSettings : OptionList<LayerSettings> {
  ATTNPACK_OPTION(std::optional<Window>, window);  // {-1, -1} for none
  ATTNPACK_OPTION(std::optional<int64_t>, chunk);  // as in GroupedQueryAttentionOptions
  ATTNPACK_OPTION(std::optional<double>, rope_base);
  ATTNPACK_OPTION(std::optional<RopeScaling>, rope_scaling);
  ATTNPACK_OPTION(bool, rope) = true;         // false: no rotation in this layer
  ATTNPACK_OPTION(bool, qk_norm) = true;      // false: no norm on its queries and keys
  ATTNPACK_OPTION(bool, query_scale) = true;  // false: its scores do not grow with the position
  ATTNPACK_OPTION(bool, experts) = true;      // false: the plain feed-forward in a model with experts
  // false: attention in a model with recurrent layers.
  ATTNPACK_OPTION(bool, recurrent) = true;
  ATTNPACK_OPTION(std::optional<std::string>, layout);  // places of the norms, as in DecoderBlockOptions
  ATTNPACK_OPTION(std::optional<int64_t>, num_kv_heads);
  ATTNPACK_OPTION(std::optional<int64_t>, head_dim);
  ATTNPACK_OPTION(std::optional<int64_t>, hidden_dim);
  ATTNPACK_OPTION(bool, keys_as_values) = false;     // there is no v_proj, as in GroupedQueryAttentionOptions
  ATTNPACK_OPTION(std::optional<int64_t>, kv_from);  // the earlier layer whose keys and values it reads
};

// A recurrent layer: its kind, and the options of that module. Options of other kinds do not apply.
struct RecurrentSettings : OptionList<RecurrentSettings> {
  // "gated_delta_net", "kimi_delta_attention", "linear_attention", "mamba2" or "gated_convolution".
  ATTNPACK_OPTION(std::string, kind) = "gated_delta_net";
  ATTNPACK_OPTION(std::optional<int64_t>, num_v_heads);  // or heads of a kind; default the model's num_heads
  ATTNPACK_OPTION(std::optional<int64_t>, num_k_heads);  // default num_v_heads; of mamba2 the groups, default 1
  // Or the head_dim of a kind, the state_dim of mamba2; default embed_dim / num_v_heads.
  ATTNPACK_OPTION(std::optional<int64_t>, head_k_dim);
  ATTNPACK_OPTION(std::optional<int64_t>, head_v_dim);  // default head_k_dim
  ATTNPACK_OPTION(std::optional<int64_t>, conv_kernel_size);
  ATTNPACK_OPTION(std::optional<double>, norm_eps);  // default the model's eps
  ATTNPACK_OPTION(bool, allow_neg_eigval) = false;
  ATTNPACK_OPTION(bool, bias) = false;
  ATTNPACK_OPTION(bool, conv_bias) = true;  // of mamba2
  ATTNPACK_OPTION(std::string, feature_map) = "identity";
  ATTNPACK_OPTION(std::string, decay) = "none";
};

// The tail of each layer, behind its feed-forward (LayerTail).
struct TailSettings : OptionList<TailSettings> {
  ATTNPACK_OPTION(std::optional<int64_t>, input_dim);   // width of each layer's input per token; none: only a factor
  ATTNPACK_OPTION(std::optional<int64_t>, vocab_size);  // rows of the table of these inputs; default the model's
};

// Further options of all attention layers, as in GroupedQueryAttentionOptions.
struct ScoreSettings : OptionList<ScoreSettings> {
  ATTNPACK_OPTION(double, softcap) = 0.0;
  ATTNPACK_OPTION(bool, sinks) = false;
  ATTNPACK_OPTION(bool, alibi) = false;
  ATTNPACK_OPTION(std::optional<double>, scale);
  ATTNPACK_OPTION(std::optional<int64_t>, rope_dim);  // the first dims of a head that rotate; default all
  ATTNPACK_OPTION(std::optional<QueryScale>, query_scale);
  ATTNPACK_OPTION(std::optional<std::string>, gate);
};

struct CausalLMOptions : OptionList<CausalLMOptions> {
  CausalLMOptions(int64_t vocab_size, int64_t embed_dim, int64_t num_layers, int64_t num_heads)
      : vocab_size_(vocab_size), embed_dim_(embed_dim), num_layers_(num_layers), num_heads_(num_heads) {}
  ATTNPACK_OPTION(int64_t, vocab_size);
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_layers);
  ATTNPACK_OPTION(int64_t, num_heads);
  ATTNPACK_OPTION(std::optional<int64_t>, num_kv_heads);  // default num_heads
  ATTNPACK_OPTION(std::optional<int64_t>, head_dim);      // default embed_dim / num_heads
  ATTNPACK_OPTION(std::optional<int64_t>, hidden_dim);    // width of the feed-forward; default 4 * embed_dim
  ATTNPACK_OPTION(int64_t, max_positions) = 2048;
  ATTNPACK_OPTION(double, rope_base) = 10000.0;
  ATTNPACK_OPTION(std::optional<RopeScaling>, rope_scaling);
  ATTNPACK_OPTION(bool, rope_interleaved) = false;
  // Latent attention in every layer. These options give its ranks, head dims, path and latent_norm; the rest comes from
  // the model's options. num_kv_heads, head_dim, qk_norm, window and out_bias do not apply to it. bias means what it
  // means in MultiHeadLatentAttention.
  ATTNPACK_OPTION(std::optional<MultiHeadLatentAttentionOptions>, latent);
  ATTNPACK_OPTION(double, eps) = 1e-6;
  ATTNPACK_OPTION(bool, tie_embeddings) = false;
  ATTNPACK_OPTION(double, init_std) = 0.02;  // standard deviation of the new embedding, as in Llama and GPT-2
  ATTNPACK_OPTION(QkNorm, qk_norm);
  ATTNPACK_OPTION(std::optional<Window>,
                  window);              // the window of every layer; "W tokens, its own included" is {W - 1, 0}
  ATTNPACK_OPTION(bool, bias) = false;  // biases on q, k and v
  ATTNPACK_OPTION(std::optional<bool>, out_bias);  // default: as bias
  ATTNPACK_OPTION(bool, mlp_bias) = false;
  ATTNPACK_OPTION(std::string, activation) = "swiglu";  // of the feed-forwards
  ATTNPACK_OPTION(std::string, norm) = "rms";           // kind and places of the norms, as in DecoderBlockOptions
  ATTNPACK_OPTION(std::optional<std::string>, layout);
  // "rope"; "learned", a table of max_positions rows that is added to the embeddings; "sinusoidal", the same with the
  // fixed rows of sinusoidal_positions; or "none".
  ATTNPACK_OPTION(std::string, position_embedding) = "rope";
  ATTNPACK_OPTION(double, embed_scale) = 1.0;     // factor on the embeddings
  ATTNPACK_OPTION(double, residual_scale) = 1.0;  // factor on what attention and feed-forward add, as in DecoderBlock
  ATTNPACK_OPTION(bool, head_bias) = false;       // a bias on the logits; not together with tie_embeddings
  ATTNPACK_OPTION(double, logit_scale) = 1.0;     // factor on the logits, before final_softcap
  ATTNPACK_OPTION(double, final_softcap) = 0.0;   // c > 0: logits become c * tanh(logit / c)
  // In training: dropout of the embeddings and of what each block adds, and that of the probabilities.
  ATTNPACK_OPTION(double, dropout) = 0.0;
  ATTNPACK_OPTION(double, attention_dropout) = 0.0;
  ATTNPACK_OPTION(std::optional<ScoreSettings>, scores);
  // A MixtureOfExperts in place of each feed-forward; its embed_dim is the model's.
  ATTNPACK_OPTION(std::optional<MixtureOfExpertsOptions>, experts);
  // A recurrent layer in the place of each attention; layer_settings say where there is attention.
  ATTNPACK_OPTION(std::optional<RecurrentSettings>, recurrent);
  ATTNPACK_OPTION(std::optional<TailSettings>, tail);
  // One for each layer, where layers differ.
  ATTNPACK_OPTION(std::vector<LayerSettings>, layer_settings);
  ATTNPACK_OPTION(Factory, factory);
};

// The inputs of CausalLM::forward beside ids.
struct CausalLMInputs : OptionList<CausalLMInputs> {
  ATTNPACK_OPTION(std::shared_ptr<ModelCache>, cache);
  ATTNPACK_OPTION(std::optional<at::Tensor>, mask);       // broadcastable to [B, Hq, L, keys], on top of causality
  ATTNPACK_OPTION(std::optional<at::Tensor>, positions);  // int64 [L] or [B, L], for RoPE
  ATTNPACK_OPTION(std::optional<at::Tensor>, lengths);    // valid tokens of each right-padded row of ids, [B]
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

  // Caches of the right shape for every layer: growing, or with room for max_len positions. Recurrent layers have a
  // RecurrentCache in each of them.
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

 private:
  // A cache for each layer, by `make`, which gets the layer's number too, or dynamic_cache()'s where it gives none. A
  // recurrent layer has a RecurrentCache, and a layer that reads another's keys has an empty cache.
  std::shared_ptr<ModelCache> caches_by_layer(
      const std::function<std::shared_ptr<KVCache>(const LayerSettings&, int64_t)>& make) const;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(CausalLMInputs())})
};
TORCH_MODULE(CausalLM);

}  // namespace attnpack
