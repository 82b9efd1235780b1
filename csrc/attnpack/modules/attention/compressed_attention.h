#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/layers/compressed.h>
#include <attnpack/modules/leaf.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/rotary_embedding.h>
#include <attnpack/ops/option_list.h>

#include <optional>

namespace attnpack {

struct CompressedAttentionOptions : OptionList<CompressedAttentionOptions> {
  CompressedAttentionOptions(int64_t embed_dim, int64_t num_heads) : embed_dim_(embed_dim), num_heads_(num_heads) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_heads);
  // Required, as are q_lora_rank, o_lora_rank and rope.
  ATTNPACK_OPTION(std::optional<int64_t>, head_dim);
  // Widths of the queries' latent, and of what each group of heads is projected to.
  ATTNPACK_OPTION(std::optional<int64_t>, q_lora_rank);
  ATTNPACK_OPTION(std::optional<int64_t>, o_lora_rank);
  // How many groups of heads the output projection has.
  ATTNPACK_OPTION(int64_t, o_groups) = 1;
  // A token sees so many tokens: itself, and those right before it.
  ATTNPACK_OPTION(int64_t, window) = 128;
  // Tokens of an entry; default: there are no entries.
  ATTNPACK_OPTION(std::optional<int64_t>, compress_rate);
  // How many entries an indexer names for each query (compressed sparse attention); default all (heavily compressed).
  ATTNPACK_OPTION(std::optional<int64_t>, top_k);
  // Heads of the indexer, and their width; default num_heads and head_dim.
  ATTNPACK_OPTION(std::optional<int64_t>, index_heads);
  ATTNPACK_OPTION(std::optional<int64_t>, index_head_dim);
  // Rotates the last dims of queries, keys and entries, and of the outputs back.
  ATTNPACK_OPTION(RotaryEmbedding, rope) = nullptr;
  // All norms of the layer take this eps.
  ATTNPACK_OPTION(double, eps) = 1e-6;
  // Default 1 / sqrt(head_dim).
  ATTNPACK_OPTION(std::optional<double>, scale);
  ATTNPACK_OPTION(Factory, factory);
};

// The weights of an indexer's heads.
class EntryScorerImpl : public torch::nn::Cloneable<EntryScorerImpl> {
 public:
  explicit EntryScorerImpl(CompressedAttentionOptions given) : options(std::move(given)) { reset(); }
  void reset() override;

  CompressedAttentionOptions options;
  Linear weights_proj{nullptr};
};
TORCH_MODULE(EntryScorer);

// The indexer of compressed sparse attention, with small entries of its own.
class EntryIndexerImpl : public LeafModule<EntryIndexerImpl> {
 public:
  explicit EntryIndexerImpl(CompressedAttentionOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& low,                                // [B, L, q_lora_rank]
                     const at::Tensor& x, const EntryRotation& rotation);  // [B, L, E] -> int32 [B, 1, L, top_k]

  void reset() override;
  void bind_members() { position_bias = parameters_["position_bias"]; }
  void pretty_print(std::ostream& stream) const override { stream << "attnpack::EntryIndexer"; }

  CompressedAttentionOptions options;
  Linear kv_proj{nullptr}, gate_proj{nullptr}, q_b_proj{nullptr};
  RMSNorm kv_norm{nullptr};
  EntryScorer scorer{nullptr};
  at::Tensor position_bias;  // [compress_rate, 2 * index_head_dim]
};
TORCH_MODULE(EntryIndexer);

// Makes the entries of a CompressedAttention.
class TokenCompressorImpl : public LeafModule<TokenCompressorImpl> {
 public:
  explicit TokenCompressorImpl(CompressedAttentionOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x);  // [B, L, E] -> [B, L / compress_rate, head_dim]

  void reset() override;
  void bind_members() { position_bias = parameters_["position_bias"]; }
  void pretty_print(std::ostream& stream) const override { stream << "attnpack::TokenCompressor"; }

  CompressedAttentionOptions options;
  Linear kv_proj{nullptr}, gate_proj{nullptr};
  RMSNorm kv_norm{nullptr};
  EntryIndexer indexer{nullptr};  // with top_k
  at::Tensor position_bias;       // [compress_rate, head_dim], twice as wide with top_k
};
TORCH_MODULE(TokenCompressor);

// DeepSeek-V4's layer (2026): a window of tokens and, with compress_rate, entries for the tokens before (layers/
// compressed.h). For whole sequences: prefill and training. It takes no cache and no mask; padding goes to the right.
// Parameter names, shapes and row order are those of DeepSeek-V4's checkpoints in transformers.
class CompressedAttentionImpl : public LeafModule<CompressedAttentionImpl> {
 public:
  explicit CompressedAttentionImpl(CompressedAttentionOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x);  // [B, L, E] -> [B, L, E]

  void reset() override;
  void bind_members() { sinks = parameters_["sinks"]; }
  void pretty_print(std::ostream& stream) const override;

  CompressedAttentionOptions options;
  Linear q_a_proj{nullptr}, q_b_proj{nullptr}, kv_proj{nullptr}, o_a_proj{nullptr}, o_b_proj{nullptr};
  RMSNorm q_a_norm{nullptr}, kv_norm{nullptr};
  TokenCompressor compressor{nullptr};
  at::Tensor sinks;  // [num_heads]
  RotaryEmbedding rope{nullptr};
};
TORCH_MODULE(CompressedAttention);

}  // namespace attnpack
