#pragma once

#include <vector>

#include <attnpack/ops/detail/attention_arguments.h>

namespace attnpack {

// The arguments that follow query, key, value and cu_seqlens_q in the schemas of packed sequences.
struct VarlenArguments : ScoreRules {
  std::optional<Tensor> cu_seqlens_k = {};       // [B + 1]; default cu_seqlens_q
  std::optional<c10::SymInt> max_seqlen_q = {};  // hints
  std::optional<c10::SymInt> max_seqlen_k = {};
  std::optional<Tensor> block_table = {};    // int32 [B, max_pages]: key and value are pools of pages
  std::optional<Tensor> kv_lens = {};        // [B]: the keys of each sequence, where they are in pages
  std::optional<c10::SymInt> q_offset = {};  // of every sequence; default: its keys - its queries
  std::optional<Tensor> q_offsets = {};      // [B], instead of q_offset
  std::optional<Tensor> dropout_seed = {};

  auto members() const {
    return std::tuple_cat(
        std::tie(cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, kv_lens, q_offset, q_offsets, dropout_seed),
        ScoreRules::members());
  }
};

// The arguments after them need defaults too.
#define ATTNPACK_VARLEN_SCHEMA                                                                                  \
  "Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? block_table=None, " \
  "Tensor? kv_lens=None, SymInt? q_offset=None, Tensor? q_offsets=None, Tensor? "                               \
  "dropout_seed=None" ATTNPACK_RULES_SCHEMA

// Those of query, key, value and sinks; the last empty if it was not asked for.
using VarlenGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The ops, through the dispatcher.
AttentionResult attention_varlen_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const Tensor& cu_seqlens_q, const VarlenArguments& args);
VarlenGradients attention_varlen_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                             const Tensor& query, const Tensor& key, const Tensor& value,
                                             const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                             const VarlenArguments& args, bool sinks_gradient);

// Checks shapes, dtypes, devices and settings, for every backend. The values of cu_seqlens are checked where they are
// read.
void check_attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                            const VarlenArguments& args);
void check_attention_varlen_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query,
                                     const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                                     const Tensor& cu_seqlens_q, const VarlenArguments& args, bool sinks_gradient);

// A packed tensor as a batch of one sequence: [T, H, D] -> [1, H, T, D], a view.
inline Tensor one_batch(const Tensor& packed) { return packed.unsqueeze(0).transpose(1, 2); }
// A pool as a batch of pages: [num_pages, page_size, H, D] -> [num_pages, H, page_size, D], a view.
inline Tensor batch_of_pages(const Tensor& pool) { return pool.transpose(1, 2); }
// The reverse of one_batch, contiguous as Meta says.
inline Tensor packed_rows(const Tensor& batch) { return batch.transpose(1, 2).squeeze(0).contiguous(); }

// The settings that all sequences share, as arguments of one call.
AttentionArguments shared_arguments(const VarlenArguments& args);

// Where the sequences stand: rows [first_query, first_query + q_len) of query and [first_key, first_key + kv_len) of
// key, and the position of the first query. Keys in pages have kv_len rows, which block_table finds.
struct Sequence {
  int64_t first_query, q_len, first_key, kv_len, q_offset;
};
// Reads cu_seqlens, or kv_lens and block_table, and checks their values. Reading waits for a device.
std::vector<Sequence> read_sequences(const Tensor& query, const Tensor& key, const Tensor& cu_seqlens_q,
                                     const VarlenArguments& args);
// How many pages hold the keys of a sequence. No sum overflows, for a kv_len that is to be refused.
inline int64_t pages_of(int64_t kv_len, int64_t page_size) { return kv_len / page_size + (kv_len % page_size > 0); }
// The arguments of the call that computes sequence number b.
AttentionArguments sequence_arguments(const VarlenArguments& args, const Sequence& sequence, int64_t b);

// One call of `attention` for each sequence: attention_formula, or the op. Pages are gathered.
using Attend = AttentionResult (*)(const Tensor&, const Tensor&, const Tensor&, const AttentionArguments&);
AttentionResult attend_each_sequence(Attend attend, const Tensor& query, const Tensor& key, const Tensor& value,
                                     const Tensor& cu_seqlens_q, const VarlenArguments& args);
// The gradients by one call of `attention_backward` for each sequence. With gradients enabled they can be
// differentiated again.
VarlenGradients differentiate_each_sequence(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                            const Tensor& query, const Tensor& key, const Tensor& value,
                                            const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                            const VarlenArguments& args, bool sinks_gradient);

}  // namespace attnpack
