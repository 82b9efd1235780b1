#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/cache/latent_cache.h>
#include <attnpack/layers/latent_attend.h>
#include <attnpack/modules/attention_module.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/rotary_embedding.h>
#include <attnpack/ops/option_list.h>

#include <memory>
#include <optional>
#include <string>

namespace attnpack {

struct MultiHeadLatentAttentionOptions : OptionList<MultiHeadLatentAttentionOptions> {
  MultiHeadLatentAttentionOptions(int64_t embed_dim, int64_t num_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_heads);
  // Width of the latents that are cached. Required, as are qk_nope_head_dim, qk_rope_head_dim and v_head_dim.
  ATTNPACK_OPTION(std::optional<int64_t>, kv_lora_rank);
  // Width of the queries' latent; none: queries are projected directly.
  ATTNPACK_OPTION(std::optional<int64_t>, q_lora_rank);
  // Dims of a head that are not rotated, and dims that are. 0 rotated dims are legal.
  ATTNPACK_OPTION(std::optional<int64_t>, qk_nope_head_dim);
  ATTNPACK_OPTION(std::optional<int64_t>, qk_rope_head_dim);
  ATTNPACK_OPTION(std::optional<int64_t>, v_head_dim);
  // Rotates the rotated dims; DeepSeek's is interleaved. Without it no dim is rotated, and pretty_print says so.
  ATTNPACK_OPTION(RotaryEmbedding, rope) = nullptr;
  // RMSNorm on both latents, eps 1e-6.
  ATTNPACK_OPTION(bool, latent_norm) = true;
  // Biases on q_a_proj, kv_a_proj_with_mqa and o_proj.
  ATTNPACK_OPTION(bool, bias) = false;
  // Dropout of the probabilities, in training.
  ATTNPACK_OPTION(double, dropout) = 0.0;
  ATTNPACK_OPTION(bool, causal) = false;
  // Default 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim). Either is multiplied by the rope's softmax factor.
  ATTNPACK_OPTION(std::optional<double>, scale);
  // The scores of a query grow with its position (layers/query_factors.h).
  ATTNPACK_OPTION(std::optional<QueryScale>, query_scale);
  // "auto", "expanded" or "absorbed": see layers/latent_attend.h.
  ATTNPACK_OPTION(std::string, path) = "auto";
  // The form that fold() gives: W_UK lies in the query projection and W_UV in o_proj, and there is no kv_b_proj.
  ATTNPACK_OPTION(bool, folded) = false;
  // As in GroupedOptions; "element" has one factor per number of the values.
  ATTNPACK_OPTION(std::optional<std::string>, gate);
  ATTNPACK_OPTION(std::string, gate_activation) = "sigmoid";
  ATTNPACK_OPTION(Factory, factory);
};

// The parts that all modules of latent attention share.
template <typename Derived, typename Options>
class LatentAttentionImpl : public torch::nn::Cloneable<Derived>, public AttentionModule {
 public:
  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& x,
                                                          const AttentionInputs& inputs = {}) override;
  // The path decides their form; "auto" means "expanded". Queries [B, H, L, nope + rope], keys of the same width,
  // values [B, H, L, v_head_dim].
  std::tuple<at::Tensor, at::Tensor, at::Tensor> project(const at::Tensor& x,
                                                         const AttentionInputs& inputs = {}) override;
  int64_t embed_dim() const override { return options.embed_dim(); }
  bool rotates() const override { return !rope.is_empty(); }
  std::shared_ptr<KVCache> new_cache() const override { return std::make_shared<LatentCache>(); }
  const Factory& factory() const override { return options.factory(); }
  // The scale of the scores: scale or its default, times the rope's softmax factor.
  double softmax_scale() const;

  // A module of equal outputs without kv_b_proj: W_UK is folded into the query projection and W_UV into o_proj.
  std::shared_ptr<Derived> fold() const;

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  Options options;
  Linear q_proj{nullptr}, q_a_proj{nullptr}, q_b_proj{nullptr};
  RMSNorm q_a_layernorm{nullptr}, kv_a_layernorm{nullptr};
  Linear kv_a_proj_with_mqa{nullptr}, kv_b_proj{nullptr}, o_proj{nullptr}, gate_proj{nullptr};
  RotaryEmbedding rope{nullptr};

 protected:
  struct Projected {
    at::Tensor query, latent, k_rope;  // [B, H, L, D], [B, Lkv, C], [B, Lkv, R]
    at::Tensor joined;                 // [B, 1, Lkv, C + R], in the shape that is cached
  };

  explicit LatentAttentionImpl(Options given) : options(std::move(given)) {}

  void check_call(const at::Tensor& x, const AttentionInputs& inputs) const;
  // The input of the query projection: the latent after its norm, [B, L, q_lora_rank]; without q_lora_rank x itself.
  at::Tensor query_latent(const at::Tensor& x);
  Projected heads(const at::Tensor& x, const AttentionInputs& inputs, const at::Tensor& low);
  LatentAttendOptions settings(const AttentionInputs& inputs) const;
  // The module's output, and the same with the probabilities. `cache` may be none.
  at::Tensor attend_over(const at::Tensor& x, const Projected& projected, const std::shared_ptr<KVCache>& cache,
                         const LatentAttendOptions& settings);
  std::tuple<at::Tensor, at::Tensor> attend_over_with_weights(const at::Tensor& x, const Projected& projected,
                                                              const std::shared_ptr<KVCache>& cache,
                                                              const LatentAttendOptions& settings);
  std::optional<at::Tensor> kv_b() const;

  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})

 private:
  // The module's output of the joined heads.
  at::Tensor output(const at::Tensor& joined, const at::Tensor& x);
  // call(options) with room in the cache.
  template <typename Call>
  auto run(const at::Tensor& x, const Projected& projected, const std::shared_ptr<KVCache>& cache,
           const LatentAttendOptions& settings, const Call& call);
};

// Keys and values are made of one latent per token, and the cache holds only the latents (DeepSeek-V2, 2024). Parameter
// names, shapes and row order are those of DeepSeek's checkpoints.
class MultiHeadLatentAttentionImpl
    : public LatentAttentionImpl<MultiHeadLatentAttentionImpl, MultiHeadLatentAttentionOptions> {
 public:
  static constexpr const char* kName = "MultiHeadLatentAttention";
  explicit MultiHeadLatentAttentionImpl(MultiHeadLatentAttentionOptions given) : LatentAttentionImpl(std::move(given)) {
    reset();
  }
};
TORCH_MODULE(MultiHeadLatentAttention);

}  // namespace attnpack
