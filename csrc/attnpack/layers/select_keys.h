#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/layers/layer_inputs.h>

#include <optional>
#include <string>

namespace attnpack {

// Where the queries of a selection stand, as in the operator.
struct SelectionPlace {
  bool causal = false;
  std::optional<at::Tensor> q_offsets;  // [B] int64, position of query row 0; default 0
  std::optional<at::Tensor> kv_lens;    // [B], valid keys; default all
  // bool (true = may attend) or floating, broadcastable to [B, Hq, L, keys]. Added to the
  // scores. Query heads that share a choice, and keys of one block, use its maximum.
  std::optional<at::Tensor> mask;
};

// The numbers of the keys that each query attends, as the operator takes them (key_index): int32, -1 for none, the best
// first, and among equal scores the lower number first. No gradient flows through a choice.

// DeepSeek-V3.2's lightning indexer: the top_k keys by sum_h weights_h * relu(query_h key). The local_keys up to the
// query's own position are among them in any case.
at::Tensor select_keys(const at::Tensor& query,    // [B, H, L, D], rotated
                       const at::Tensor& key,      // [B, 1, Lkv, D], rotated
                       const at::Tensor& weights,  // [B, L, H]
                       int64_t top_k, const SelectionPlace& place = {},
                       int64_t local_keys = 0);  // -> [B, 1, L, min(top_k, Lkv)]

// The new tokens of a lightning indexer, before rotation. RoPE rotates the first dims of queries and keys.
struct IndexerTokens {
  at::Tensor query;    // [B, H, L, D]
  at::Tensor key;      // [B, 1, L, D]
  at::Tensor weights;  // [B, L, H]
};

// select_keys for new tokens: rotates, appends the keys to inputs.cache if there is one (as a LatentCache gives it:
// keys [B, 1, capacity, D], and values of no width), and selects among all keys that the mask of inputs leaves.
at::Tensor index_keys(const IndexerTokens& tokens, int64_t top_k, int64_t local_keys,
                      const LayerInputs& inputs = {});  // -> [B, 1, L, min(top_k, keys)]

// The loss that trains an indexer (DeepSeek-V3.2 2025, section 2.1): the mean of KL(p || softmax(I)) over the valid
// queries. p is the sum over the heads of the probabilities, divided by its own sum, and I = sum_h weights_h
// relu(query_h key) / sqrt(H D). With key_index, I covers only the keys named there, and the probabilities are those
// of attention over them. With at_names too, they stand only at the names, in their order, and memory grows with n. If
// a row names a key twice, the first place counts. The mask of inputs is added to I. No gradient flows into the
// probabilities.
at::Tensor indexer_loss(const IndexerTokens& tokens,
                        const at::Tensor& probabilities,             // [B, Hq, L, L], with at_names [B, Hq, L, n]
                        const std::optional<at::Tensor>& key_index,  // [B, 1, L, n]
                        const LayerInputs& inputs = {}, bool at_names = false);  // -> [], in fp32 at least

// How blocks of keys are scored and chosen.
struct BlockOptions {
  int64_t block = 64;           // keys of a block
  int64_t top_blocks = 16;      // how many blocks a query attends, its local ones among them
  int64_t local_blocks = 1;     // its own block and those before it, which it attends in any case
  std::string scorer = "mean";  // query times the mean of a block's keys (MoBA, Lu et al. 2025, arXiv 2502.13189), or
                                // "max", the greatest product of the query and a key, as MiniMax-M3's indexer
};

// The blocks that the query heads of a kv head attend, by the sum of their scores. With "mean" a causal query attends
// its own block, so local_blocks is at least 1 there.
at::Tensor select_blocks(const at::Tensor& query,  // [B, Hq, L, D]
                         const at::Tensor& key,    // [B, Hkv, Lkv, D]
                         const BlockOptions& options, const SelectionPlace& place = {},
                         const std::optional<at::Tensor>& block_sums =
                             std::nullopt);  // [B, Hkv, blocks or more, D] -> [B, Hkv, L, min(top_blocks, blocks)]

// Checks that the options choose blocks. `causal` is that of the queries.
void check_blocks(const BlockOptions& options, bool causal);

}  // namespace attnpack
