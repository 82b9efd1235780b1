#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace attnpack {

// Where the queries of a selection stand, as in the operator.
struct SelectionPlace {
  bool causal = false;
  std::optional<at::Tensor> q_offsets;  // [B] int64, position of query row 0; default 0
  std::optional<at::Tensor> kv_lens;    // [B], valid keys; default all
};

// The numbers of the keys that each query attends, as the operator takes them (key_index): int32, -1 for none, the best
// first. No gradient flows through a choice.

// DeepSeek-V3.2's lightning indexer: the top_k keys by sum_h weights_h * relu(query_h key).
at::Tensor select_keys(const at::Tensor& query,                           // [B, H, L, D], rotated
                       const at::Tensor& key,                             // [B, 1, Lkv, D], rotated
                       const at::Tensor& weights,                         // [B, L, H]
                       int64_t top_k, const SelectionPlace& place = {});  // -> [B, 1, L, min(top_k, Lkv)]

// How blocks of keys are scored and chosen.
struct BlockOptions {
  int64_t block = 64;           // keys of a block
  int64_t top_blocks = 16;      // how many blocks a query attends, its local ones among them
  int64_t local_blocks = 1;     // its own block and those before it, which it attends in any case
  std::string scorer = "mean";  // query times the mean of a block's keys (MoBA, Lu et al. 2025, arXiv 2502.13189), or
                                // "max", the greatest product of the query and a key (MiniMax-M3)
};

// The blocks that the query heads of a kv head attend, by the sum of their scores. With "mean" a causal query attends
// its own block, so local_blocks is at least 1 there.
at::Tensor select_blocks(const at::Tensor& query,  // [B, Hq, L, D]
                         const at::Tensor& key,    // [B, Hkv, Lkv, D]
                         const BlockOptions& options,
                         const SelectionPlace& place = {});  // -> [B, Hkv, L, min(top_blocks, blocks)]

}  // namespace attnpack
