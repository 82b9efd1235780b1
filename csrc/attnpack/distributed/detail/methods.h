#pragma once

#include <attnpack/distributed/layouts.h>
#include <attnpack/ops/attention.h>

#include <tuple>

namespace attnpack::distributed {

// The ways of attention over a sequence that is sharded over the ranks: (out [B, Hq, n, Dv], lse [B, Hq, n]) of this
// rank's n rows. The arguments are checked already, and all ranks have agreed on them. rules.kv_lens are those of the
// whole sequences.

// Every rank has all compact kv heads, in one collective, and attends with its own rows.
std::tuple<at::Tensor, at::Tensor> attend_gathered(const at::Tensor& query,  // [B, Hq, n, D]
                                                   const at::Tensor& key,    // [B, Hkv, m, D]
                                                   const at::Tensor& value,  // [B, Hkv, m, Dv]
                                                   const AttentionOptions& rules, const Group& group, Layout layout);

// The second half of it: over whole keys and values [B, Hkv, ranks * m, ...].
std::tuple<at::Tensor, at::Tensor> attend_rows(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                               const AttentionOptions& rules, const Group& group, Layout layout);

// Ranks exchange their parts of the sequence for shares of the heads, attend over the whole sequence, and exchange
// back (DeepSpeed-Ulysses, Jacobs et al. 2023). A rank gets the kv heads that its query heads read: with fewer of them
// than ranks several ranks get the same one, and nothing is padded.
std::tuple<at::Tensor, at::Tensor> attend_ulysses(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, const AttentionOptions& rules,
                                                  const Group& group, Layout layout);

// Keys and values pass from rank to rank, one part at a time, while each rank attends over the part that it has (Ring
// Attention, Liu et al. 2023). Partial results are joined by their lse in fp32. Backward passes the parts round once
// more, and their gradients with them.
std::tuple<at::Tensor, at::Tensor> attend_ring(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                               const AttentionOptions& rules, const Group& group, Layout layout);

}  // namespace attnpack::distributed
