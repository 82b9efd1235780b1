#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <attnpack/ops/score_rules.h>

#include <optional>
#include <tuple>

namespace attnpack {

using at::Tensor;

// The arguments that follow query, key and value in every schema of the family.
struct AttentionArguments : ScoreRules {
  std::optional<Tensor> mask = {};          // bool or float, broadcasts to [B, Hq, Lq, Lkv]
  c10::SymInt q_offset = 0;                 // position of query row 0; "end" is a number here
  std::optional<Tensor> q_offsets = {};     // [B], instead of q_offset
  std::optional<Tensor> kv_lens = {};       // [B]
  std::optional<Tensor> dropout_seed = {};  // [1] int64, drawn outside the op
  std::optional<Tensor> key_index = {};     // [B, 1 or Hkv, Lq, n]: the blocks of keys that each row may attend
  int64_t key_block = 1;                    // how many keys a block has

  auto members() const {
    return std::tuple_cat(std::tie(mask, q_offset, q_offsets, kv_lens, dropout_seed, key_index, key_block),
                          ScoreRules::members());
  }
};

// The kv head that a query head reads.
inline int64_t kv_head_of(const AttentionArguments& args, int64_t head, int64_t num_heads, int64_t num_kv_heads) {
  return args.head_map ? (*args.head_map)[head] : head / (num_heads / num_kv_heads);
}

// The same arguments in a schema. The arguments after them need defaults too.
#define ATTNPACK_ATTENTION_SCHEMA                                                                            \
  "Tensor? mask=None, SymInt q_offset=0, Tensor? q_offsets=None, Tensor? kv_lens=None, Tensor? dropout_seed" \
  "=None, Tensor? key_index=None, int key_block=1" ATTNPACK_RULES_SCHEMA

// AttentionResult: out and lse. AttentionGradients: those of query, key, value, mask, sinks; empty where they were not
// asked for.
using AttentionResult = std::tuple<Tensor, Tensor>;
using AttentionGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// A seed drawn from torch's generator of the device, where there is dropout. A CUDA graph draws it anew at each replay.
std::optional<Tensor> dropout_seed(double dropout_p, const c10::Device& device);

// The ops, through the dispatcher.
AttentionResult attention_op(const Tensor& query, const Tensor& key, const Tensor& value,
                             const AttentionArguments& args);
AttentionGradients attention_backward_op(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                         const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                                         const Tensor& lse, const AttentionArguments& args, bool mask_gradient,
                                         bool sinks_gradient);

// Whether the kernels of attention read the dtype.
bool is_element(at::ScalarType dtype);
// Checks shapes, dtypes, devices and settings, for every backend.
void check_attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionArguments& args);
// The part of check_attention that a layer calls before it writes its cache. The seed is drawn later.
void check_dropout(double dropout_p);
// The same for the backward pass, with the results of the forward pass.
void check_attention_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query,
                              const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                              const AttentionArguments& args, bool mask_gradient, bool sinks_gradient);
// Checks the values of kv_lens, where reading them does not wait for a device.
void check_kv_lens_values(const int64_t* kv_lens, int64_t batch, int64_t kv_len);
// How many blocks of keys a sequence has; the last may be shorter.
template <class Size>
Size count_blocks(const Size& kv_len, int64_t key_block) {
  return (kv_len + (key_block - 1)) / key_block;
}
// Raises for the first number of key_index, a tensor with memory on the CPU, that is none of a sequence's blocks, nor
// -1. Returns if there is none.
void check_key_index_values(const Tensor& key_index, int64_t key_block, int64_t kv_len);

// The positions of the query rows, [Lq, 1] or [B, 1, Lq, 1].
Tensor row_positions(const Tensor& query, const AttentionArguments& args);
// Whether the rows may attend the keys with the numbers `column` by causality, window, chunk and kv_lens; none where
// all may. column: broadcasts to [B, heads, Lq, keys]. The result broadcasts so too.
std::optional<Tensor> allowed_by_range(const Tensor& position, const Tensor& column, const AttentionArguments& args);
// The arguments with a mask in place of their `chunk`, for rows and keys at these positions, as those of
// allowed_by_range.
AttentionArguments with_chunks_masked(AttentionArguments args, const Tensor& position, const Tensor& column);

// The plain formula in ATen ops, and its gradients, which may be differentiated again. Forward mode, double backward
// and devices without a kernel run them. They hold the scores [B, Hq, Lq, Lkv].
AttentionResult attention_formula(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const AttentionArguments& args);
AttentionGradients attention_backward_formula(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                              const Tensor& query, const Tensor& key, const Tensor& value,
                                              const AttentionArguments& args, bool mask_gradient, bool sinks_gradient);
Tensor scores_formula(const Tensor& query, const Tensor& key, const AttentionArguments& args, c10::string_view stage);

}  // namespace attnpack
