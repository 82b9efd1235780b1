#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>

#include <attnpack/cache/dynamic_cache.h>
#include <attnpack/layers/attend.h>
#include <attnpack/layers/gate_heads.h>
#include <attnpack/layers/query_factors.h>
#include <attnpack/modules/leaf.h>
#include <attnpack/modules/part.h>
#include <attnpack/ops/option_list.h>

#include <memory>
#include <optional>
#include <tuple>

namespace attnpack {

// Keys and values of the tokens of a call as they enter the operator, [B, Hkv, L, D]: the layer that is given an empty
// one puts its own there, and later layers read them (AttentionInputs::kv).
struct SharedKeys {
  at::Tensor key, value;
};

// The inputs of an attention module's forward beside x.
struct AttentionInputs : OptionList<AttentionInputs> {
  AttentionInputs() = default;
  /* implicit */ AttentionInputs(at::Tensor context) : context_(std::move(context)) {}

  // Keys and values come from here (cross-attention), [B, Lkv, kdim]; value_context [B, Lkv, vdim] defaults to it.
  ATTNPACK_OPTION(std::optional<at::Tensor>, context);
  ATTNPACK_OPTION(std::optional<at::Tensor>, value_context);
  // bool (true = may attend) or additive float, broadcastable to [B, Hq, L, keys]; with a cache: all keys in it.
  ATTNPACK_OPTION(std::optional<at::Tensor>, mask);
  // Default: the module's own setting; with context false.
  ATTNPACK_OPTION(std::optional<bool>, causal);
  // New keys and values are appended to it first. The queries stand after the positions that it held before.
  ATTNPACK_OPTION(std::shared_ptr<KVCache>, cache);
  // For RoPE only, int64 [L] or [B, L]; default: after the cache, else 0..L-1.
  ATTNPACK_OPTION(std::optional<at::Tensor>, positions);
  // Valid new tokens (with context: valid context keys) of each sequence, [B].
  ATTNPACK_OPTION(std::optional<at::Tensor>, kv_lens);
  // The cache of another layer, which has appended these tokens' keys and values: this layer reads them, and appends
  // nothing (Brandon et al. 2024, arXiv 2405.12981). No gradient reaches the layer that filled it.
  ATTNPACK_OPTION(std::shared_ptr<KVCache>, kv_from);
  // Only for SparseAttention and SparseLatentAttention: a LatentCache, or a StaticCache of one head, for the keys of
  // their indexer, beside cache.
  ATTNPACK_OPTION(std::shared_ptr<KVCache>, index_cache);
  // The numbers of the keys that each query may attend, [B, 1 or Hkv, L, n], as in the operator; with a cache they are
  // positions of the cache. For multi-head, grouped-query, multi-query and latent attention; the others refuse it.
  ATTNPACK_OPTION(std::optional<at::Tensor>, key_index);
  // key_index names blocks of so many keys. For multi-head, grouped-query and multi-query attention.
  ATTNPACK_OPTION(int64_t, key_block) = 1;
  // Only for recurrent layers: packed sequences in a batch of one, as in linear_attention.
  ATTNPACK_OPTION(std::optional<at::Tensor>, cu_seqlens);

 public:
  // A Decoder sets this in a call without a cache: keys and values of these tokens, with gradients, that its layers
  // share.
  std::shared_ptr<SharedKeys> kv;
};

// The interface of an attention layer, as blocks use it.
class AttentionModule : public PartInterface {
 public:
  // x [B, L, E] -> [B, L, E]
  virtual at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) = 0;
  // The same, and the probabilities before dropout, [B, Hq, L, keys]
  virtual std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& x,
                                                                  const AttentionInputs& inputs = {}) = 0;
  // q [B, Hq, L, D], k [B, Hkv, Lkv, D], v [B, Hkv, Lkv, Dv] as they enter the operator. Reads context,
  // value_context and positions of inputs.
  virtual std::tuple<at::Tensor, at::Tensor, at::Tensor> project(const at::Tensor& x,
                                                                 const AttentionInputs& inputs = {}) = 0;
  virtual int64_t embed_dim() const = 0;
  // The width of forward's result.
  virtual int64_t out_dim() const { return embed_dim(); }
  // Whether forward rotates queries by their positions. A decoder block then gives them to cross-attention.
  virtual bool rotates() const { return true; }
  // Whether forward counts how far a key is from a query: by a window or ALiBi. Cross-attention then needs the whole
  // target, so a decoder block refuses a cache.
  virtual bool counts_distances() const { return false; }
  // An empty cache that grows, of the kind that forward fills.
  virtual std::shared_ptr<KVCache> new_cache() const { return std::make_shared<DynamicCache>(); }
  virtual const Factory& factory() const = 0;
};

}  // namespace attnpack
