#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <attnpack/layers/select_keys.h>
#include <attnpack/modules/attention/latent_attention.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/rotary_embedding.h>
#include <attnpack/ops/option_list.h>

#include <optional>
#include <string>

namespace attnpack {

struct SparseLatentAttentionOptions : OptionList<SparseLatentAttentionOptions> {
  SparseLatentAttentionOptions(int64_t embed_dim, int64_t num_heads) : embed_dim_(embed_dim), num_heads_(num_heads) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_heads);
  // How many keys a query attends. Required, as are q_lora_rank and those that MultiHeadLatentAttentionOptions
  // requires.
  ATTNPACK_OPTION(std::optional<int64_t>, top_k);
  // Heads of the indexer, and their width; default num_heads and qk_nope_head_dim + qk_rope_head_dim.
  ATTNPACK_OPTION(std::optional<int64_t>, index_heads);
  ATTNPACK_OPTION(std::optional<int64_t>, index_head_dim);
  // Whether the indexer rotates pairs (2 i, 2 i + 1), as GLM-5's, or (i, i + dim / 2), as DeepSeek's.
  ATTNPACK_OPTION(bool, index_interleaved) = false;
  // As in MultiHeadLatentAttentionOptions. The indexer reads the queries' latent too.
  ATTNPACK_OPTION(std::optional<int64_t>, kv_lora_rank);
  ATTNPACK_OPTION(std::optional<int64_t>, q_lora_rank);
  ATTNPACK_OPTION(std::optional<int64_t>, qk_nope_head_dim);
  ATTNPACK_OPTION(std::optional<int64_t>, qk_rope_head_dim);
  ATTNPACK_OPTION(std::optional<int64_t>, v_head_dim);
  // Rotates the first dims of the indexer's heads too, there in the pairs of index_interleaved.
  ATTNPACK_OPTION(RotaryEmbedding, rope) = nullptr;
  ATTNPACK_OPTION(bool, latent_norm) = true;
  ATTNPACK_OPTION(bool, bias) = false;
  ATTNPACK_OPTION(double, dropout) = 0.0;
  ATTNPACK_OPTION(bool, causal) = false;
  ATTNPACK_OPTION(std::optional<double>, scale);
  ATTNPACK_OPTION(std::string, path) = "auto";
  ATTNPACK_OPTION(bool, folded) = false;
  ATTNPACK_OPTION(std::optional<std::string>, gate);
  ATTNPACK_OPTION(std::string, gate_activation) = "sigmoid";
  ATTNPACK_OPTION(Factory, factory);
};

// The queries, keys and weights by which DeepSeek-V3.2 chooses keys (layers/select_keys.h). Parameter names are those
// of its checkpoints.
class LightningIndexerImpl : public torch::nn::Cloneable<LightningIndexerImpl> {
 public:
  explicit LightningIndexerImpl(SparseLatentAttentionOptions given) : options(std::move(given)) { reset(); }

  IndexerTokens forward(const at::Tensor& low,  // [B, L, q_lora_rank]
                        const at::Tensor& x);   // [B, L, E]

  void reset() override;
  void pretty_print(std::ostream& stream) const override { stream << "attnpack::LightningIndexer"; }

  SparseLatentAttentionOptions options;
  Linear wq_b{nullptr}, wk{nullptr}, weights_proj{nullptr};
  LayerNorm k_norm{nullptr};
};
TORCH_MODULE(LightningIndexer);

// Latent attention in which a query reads the top_k keys that an indexer names, and no others (DeepSeek-V3.2). A
// LatentCache holds the indexer's keys too; beside another cache they lie in a LatentCache of their own,
// AttentionInputs::index_cache. Parameter names, shapes and row order are those of DeepSeek's checkpoints.
class SparseLatentAttentionImpl : public LatentAttentionImpl<SparseLatentAttentionImpl, SparseLatentAttentionOptions> {
 public:
  static constexpr const char* kName = "SparseLatentAttention";
  explicit SparseLatentAttentionImpl(SparseLatentAttentionOptions given) : LatentAttentionImpl(std::move(given)) {
    reset();
  }

  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& x,
                                                          const AttentionInputs& inputs = {}) override;
  // attnpack::indexer_loss for x: against attention over all keys, or, if sparse, over those that the indexer names, in
  // memory that grows with their number. Gradients flow only into the indexer. It reads mask, causal, positions and
  // kv_lens of inputs.
  at::Tensor indexer_loss(const at::Tensor& x, bool sparse = false, const AttentionInputs& inputs = {});

  void reset() override;

  LightningIndexer indexer{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})

 private:
  // The settings without the index_cache, and with the rope of the indexer.
  LayerInputs index_inputs(const LatentAttendOptions& settings) const;
  // call(projected, settings) with the keys that the indexer names, and both caches.
  template <typename Call>
  auto select(const at::Tensor& x, const AttentionInputs& inputs, const Call& call);
};
TORCH_MODULE(SparseLatentAttention);

}  // namespace attnpack
