#pragma once

#include <attnpack/distributed/attention.h>
#include <attnpack/layers/sharded_attention.h>

#include <memory>

namespace attnpack::distributed {

struct ContextParallelOptions {
  // The traffic between the ranks. With kAllGather latent attention sends its latents, with the others its keys and
  // values.
  TORCH_ARG(Method, method) = Method::kAllGather;
  // How shard_sequence has dealt the sequences out; kZigzag is equal work for every rank in causal attention.
  TORCH_ARG(Layout, layout) = Layout::kContiguous;
};

// While it lives, the attention modules of this thread attend over sequences that are sharded over the ranks
// (context parallelism):
//
//   const ContextParallel scope(group, ContextParallelOptions().layout(Layout::kZigzag));
//   const auto out = model(shard_sequence(ids, group, 1, Layout::kZigzag));  // this rank's rows
//
// x [B, L / ranks, E] and a context are parts of the sequences; kv_lens and lengths are those of the whole sequences.
// RoPE and learned positions are those of the rows in the whole sequences; positions, where they are given, too. The
// gradients of weights are this rank's share: add them up over the ranks (all_reduce). Backward may run later. Scopes
// may stand inside one another: the innermost one counts.
//
// Raises in modules, on all ranks, for a mask, dropout in training, and RoPE whose frequencies follow the length; and
// for what any rank gives of a cache, kv_from, weights of attention and generate, which are done outside.
class ContextParallel {
 public:
  explicit ContextParallel(Group group, const ContextParallelOptions& options = {});
  ~ContextParallel();
  ContextParallel(const ContextParallel&) = delete;
  ContextParallel& operator=(const ContextParallel&) = delete;

 private:
  std::unique_ptr<const ShardedAttention> local_;
  const ShardedAttention* before_;
};

}  // namespace attnpack::distributed
