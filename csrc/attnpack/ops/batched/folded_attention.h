#pragma once

#include <attnpack/ops/batched/vmap_level.h>
#include <attnpack/ops/detail/attention_arguments.h>

namespace attnpack {

// Where the samples of a vmapped call go. Into the batch, or into the heads if a number per head differs between the
// samples, or if all samples share their keys, which then stay where they are. Each sample is a call of its own where
// neither fits: numbers per head and per sequence both differ, or there is dropout, whose draw depends on the place.
enum class Fold { kBatch, kHeads, kNone };

struct SampledAttention {
  Sampled query, key, value;
  std::optional<Sampled> mask, q_offsets, kv_lens, sinks, alibi_slopes, dropout_seed, key_index;
  AttentionArguments args;  // without tensors

  SampledAttention(VmapLevel& level, const Tensor& query, const Tensor& key, const Tensor& value,
                   const AttentionArguments& args);

  // gradients: the call is a backward, which gives each sample gradients of its own for every tensor.
  Fold fold(bool gradients, bool sinks_gradient) const;

  c10::SymInt batch() const { return query.tensor.sym_size(query.batched ? 1 : 0); }
  c10::SymInt num_heads() const { return query.tensor.sym_size(query.batched ? 2 : 1); }
  c10::SymInt num_kv_heads() const { return key.tensor.sym_size(key.batched ? 2 : 1); }
};

// The arguments of the one call.
struct FoldedAttention {
  Tensor query, key, value;
  AttentionArguments args;
};

FoldedAttention fold_attention(const VmapLevel& level, const SampledAttention& call, Fold fold, bool gradients,
                               bool mask_gradient);

// [samples, B, H, ...] -> [samples * B, H, ...] or [B, samples * H, ...], and back.
Tensor fold_samples(const Tensor& x, Fold fold);
Tensor unfold_samples(const Tensor& x, Fold fold, const c10::SymInt& samples);

// The gradient of a mask of this shape for each sample, from the gradient of the folded mask.
Tensor unfold_mask_gradient(const Tensor& gradient, Fold fold, const c10::SymInt& samples, c10::SymIntArrayRef shape);

}  // namespace attnpack
