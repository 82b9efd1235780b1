#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/layers/select_keys.h>
#include <attnpack/modules/attention_module.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/rotary_embedding.h>
#include <attnpack/ops/option_list.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>

namespace attnpack {

struct SparseAttentionOptions : OptionList<SparseAttentionOptions> {
  SparseAttentionOptions(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads), num_kv_heads_(num_kv_heads) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_heads);
  ATTNPACK_OPTION(int64_t, num_kv_heads);
  // Who names the keys of a query: "indexer" (DeepSeek-V3.2), or the score of a block of keys, by their "mean" (MoBA)
  // or "max".
  ATTNPACK_OPTION(std::string, selector) = "indexer";
  // How many keys ("indexer") or blocks a query attends; required.
  ATTNPACK_OPTION(std::optional<int64_t>, top_k);
  // Keys of a block, for "mean" and "max"; default 64.
  ATTNPACK_OPTION(std::optional<int64_t>, key_block);
  // How many of the newest keys or blocks are among the top_k in any case; default 0 keys, 1 block.
  ATTNPACK_OPTION(std::optional<int64_t>, num_local);
  // Heads of the indexer, and their width; default num_heads and head_dim.
  ATTNPACK_OPTION(std::optional<int64_t>, index_heads);
  ATTNPACK_OPTION(std::optional<int64_t>, index_head_dim);
  // Default embed_dim / num_heads.
  ATTNPACK_OPTION(std::optional<int64_t>, head_dim);
  ATTNPACK_OPTION(bool, bias) = false;
  // Default: as bias.
  ATTNPACK_OPTION(std::optional<bool>, out_bias);
  // Dropout of the probabilities, in training.
  ATTNPACK_OPTION(double, dropout) = 0.0;
  ATTNPACK_OPTION(bool, causal) = false;
  ATTNPACK_OPTION(double, softcap) = 0.0;
  // Rotates the indexer's queries and keys too, their first dims.
  ATTNPACK_OPTION(RotaryEmbedding, rope) = nullptr;
  // Default 1 / sqrt(head_dim).
  ATTNPACK_OPTION(std::optional<double>, scale);
  ATTNPACK_OPTION(Factory, factory);
};

// Grouped-query attention in which a query reads the keys that a selector names, and no others (layers/select_keys.h).
// An indexer (index_q_proj, index_k_proj, index_k_norm, index_weights_proj) has keys of its own. A SparseCache holds
// them too; beside another cache they lie in a LatentCache, AttentionInputs::index_cache. With "mean" a SparseCache
// keeps the sums of blocks, so that a step reads these and the keys of the chosen blocks; of another cache it reads all
// keys.
class SparseAttentionImpl : public LeafModule<SparseAttentionImpl>, public AttentionModule {
 public:
  SparseAttentionImpl(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads, int64_t top_k)
      : SparseAttentionImpl(SparseAttentionOptions(embed_dim, num_heads, num_kv_heads).top_k(top_k)) {}
  explicit SparseAttentionImpl(SparseAttentionOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& x,
                                                          const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> project(const at::Tensor& x,
                                                         const AttentionInputs& inputs = {}) override;
  // attnpack::indexer_loss for x: against attention over all keys, or, if sparse, over those that the indexer names, in
  // memory that grows with their number. Gradients flow only into the indexer. It reads mask, causal, positions and
  // kv_lens of inputs.
  at::Tensor indexer_loss(const at::Tensor& x, bool sparse = false, const AttentionInputs& inputs = {});
  int64_t embed_dim() const override { return options.embed_dim(); }
  bool rotates() const override { return !rope.is_empty(); }
  std::shared_ptr<KVCache> new_cache() const override;
  const Factory& factory() const override { return options.factory(); }

  void reset() override;
  void bind_members() {}
  void pretty_print(std::ostream& stream) const override;

  SparseAttentionOptions options;
  Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  Linear index_q_proj{nullptr}, index_k_proj{nullptr}, index_weights_proj{nullptr};  // of the indexer
  LayerNorm index_k_norm{nullptr};
  RotaryEmbedding rope{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})

 private:
  bool indexes() const { return options.selector() == "indexer"; }
  // q [B, Hq, L, D], k and v [B, Hkv, L, D], not rotated.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> heads(const at::Tensor& x);
  IndexerTokens indexer(const at::Tensor& x);
  AttendOptions settings(const AttentionInputs& inputs) const;
  bool keeps_sums() const;  // of the keys of blocks, in a SparseCache: of keys that are stored as they are read
  // The keys that the indexer names, unless it names all. Its keys go into the caches, if there are any.
  std::optional<at::Tensor> selected_keys(const at::Tensor& x, const AttentionInputs& of_call,
                                          const LayerInputs& settings);
  // call(q, k, v, settings) with both caches.
  template <typename Call>
  auto run(const at::Tensor& x, const AttentionInputs& inputs, const Call& call);
};
TORCH_MODULE(SparseAttention);

}  // namespace attnpack
