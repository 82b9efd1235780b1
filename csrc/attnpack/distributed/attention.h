#pragma once

#include <attnpack/distributed/layouts.h>
#include <attnpack/ops/attention.h>

namespace attnpack::distributed {

// The traffic between the ranks of a sequence. kAllGather: every rank gets the keys and values of all. kUlysses: ranks
// exchange their parts of the sequence for shares of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023). kRing: keys and
// values travel from rank to rank while these compute, and a rank holds two parts of them at a time (Ring Attention,
// Liu et al. 2023). Keys and values have as many heads on the way as they have in the tensors, not as the queries.
enum class Method { kAllGather, kUlysses, kRing };

// attnpack::attention over a sequence that is sharded over the ranks, as shard_sequence deals it out; differentiable,
// twice but for kRing. Rows and keys have their positions in the whole sequence; kv_lens are those of the whole
// sequences. The gradients of sinks are this rank's share: their sum over the ranks is that of one process.
//
// Raises for what is not supported over several processes (mask, dropout_p, q_offset, key_index), and on all ranks
// where an argument does not fit on one of them or differs between them.
at::Tensor attention(const at::Tensor& query,  // [B, Hq, Lq / ranks, D]
                     const at::Tensor& key,    // [B, Hkv, Lkv / ranks, D]
                     const at::Tensor& value,  // [B, Hkv, Lkv / ranks, Dv]
                     const Group& group, const AttentionOptions& options = {}, Layout layout = Layout::kContiguous,
                     Method method = Method::kAllGather);  // -> [B, Hq, Lq / ranks, Dv]

// The same, and lse [B, Hq, Lq / ranks].
std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value, const Group& group,
                                                      const AttentionOptions& options = {},
                                                      Layout layout = Layout::kContiguous,
                                                      Method method = Method::kAllGather);

}  // namespace attnpack::distributed
