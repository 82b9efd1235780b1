#pragma once

#include <attnpack/ops/attention.h>

namespace attnpack {

// The options of attention_varlen, with the rules of score_rules.h. B: number of sequences.
struct VarlenOptions : WithScoreRules<VarlenOptions> {
  // Where the keys of each sequence begin and the last one ends, int32 or int64 [B + 1]; default cu_seqlens_q.
  TORCH_ARG(std::optional<at::Tensor>, cu_seqlens_k);
  // Hints: the longest query and key sequence. Nothing is read by them. On CUDA they choose among kernels.
  TORCH_ARG(std::optional<int64_t>, max_seqlen_q);
  TORCH_ARG(std::optional<int64_t>, max_seqlen_k);
  // Keys in pages: the pages of each sequence in order, int32 [B, max_pages], and its number of keys, int32 or int64
  // [B]. key and value are pools of any strides, [num_pages, page_size, Hkv, D] and [num_pages, page_size, Hkv, Dv].
  // Key j of sequence b is row j % page_size of page block_table[b, j / page_size]. No other page is read, and no entry
  // of block_table after those that kv_lens needs. Pools have no gradients.
  TORCH_ARG(std::optional<at::Tensor>, block_table);
  TORCH_ARG(std::optional<at::Tensor>, kv_lens);
  // Position of each sequence's query row 0: End{} (its keys - its queries), an int, or an integer tensor [B].
  TORCH_ARG(QOffset, q_offset) = End {};
};

// Attention of packed sequences without padding. Sequence b has the query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1],
// and attends only its own keys. Its results are those of one `attention` call. The work is the sum over the
// sequences. Causality and window are bottom-right by default: query row i of a sequence stands at i + keys - queries.
// On CUDA all sequences are one call of the kernels, which read the lengths on the device: nobody waits for it, and a
// captured graph reads them at each replay. cu_seqlens out of range are clamped there, unless ATTNPACK_CHECK=1 asks for
// an error. Dropout, chunk, and pages of head dims beyond 256 or not in 16 bits, are one call of `attention` for each
// sequence.
// Errors: c10::Error that names the argument.
at::Tensor attention_varlen(const at::Tensor& query,             // [T, Hq, D]
                            const at::Tensor& key,               // [S, Hkv, D], or a pool
                            const at::Tensor& value,             // [S, Hkv, Dv], or a pool
                            const at::Tensor& cu_seqlens_q,      // [B + 1]
                            const VarlenOptions& options = {});  // -> [T, Hq, Dv]

// The same, and the natural log of the softmax denominator: (out, lse [Hq, T] in fp32, fp64 for fp64 inputs).
std::tuple<at::Tensor, at::Tensor> attention_varlen_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                             const at::Tensor& value, const at::Tensor& cu_seqlens_q,
                                                             const VarlenOptions& options = {});

}  // namespace attnpack
