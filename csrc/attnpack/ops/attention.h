#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/arg.h>

#include <attnpack/ops/score_rules.h>

#include <optional>
#include <string>
#include <tuple>
#include <variant>

namespace attnpack {

// A q_offset for which the last query row stands at the last valid key (bottom-right causality).
struct End {};
using QOffset = std::variant<int64_t, at::Tensor, End>;

// The options of the operator. All rules of ops/score_rules.h are options too, from causal to query_scale. B: batch.
// Hq, Hkv: query heads and kv heads.
struct AttentionOptions : WithScoreRules<AttentionOptions> {
  // bool (true = may attend) or additive float, broadcastable to [B, Hq, Lq, Lkv], right-aligned.
  TORCH_ARG(std::optional<at::Tensor>, mask);
  // Position of query row 0, from which causality, window and ALiBi count: an int, an integer tensor [B], or End{}
  // (valid keys - Lq).
  TORCH_ARG(QOffset, q_offset) = int64_t { 0 };
  // Valid keys of each sequence, integer tensor [B].
  TORCH_ARG(std::optional<at::Tensor>, kv_lens);
  // The keys that each row may attend, int32 or int64 [B, 1 or Hkv, Lq, n]: numbers of keys, or of blocks of key_block
  // keys, in any order. -1 names none, and a number named twice counts once. All other rules still apply. Keys that a
  // row does not name are not read for it: work and memory grow with n * key_block. Each row has the bits of a call
  // with that row alone over its keys, gathered in rising order. Numbers out of range raise on the CPU.
  TORCH_ARG(std::optional<at::Tensor>, key_index);
  // How many keys a block has.
  TORCH_ARG(int64_t, key_block) = 1;
};

// softmax(scale * query key^T + mask) value. Grouped heads are native: no keys are repeated, and there is nothing of
// size Lq x Lkv in memory. fp64, fp32, bf16 or fp16, one dtype; any strides; D and Dv may differ. Errors: c10::Error
// that names the argument. (Vaswani et al. 2017, section 3.2; Ainslie et al. 2023; tiling: Dao et al. 2022.)
at::Tensor attention(const at::Tensor& query,                // [B, Hq, Lq, D]
                     const at::Tensor& key,                  // [B, Hkv, Lkv, D]
                     const at::Tensor& value,                // [B, Hkv, Lkv, Dv]
                     const AttentionOptions& options = {});  // -> [B, Hq, Lq, Dv]

// The same, and the natural log of the softmax denominator: (out, lse [B, Hq, Lq] in fp32, fp64 for fp64 inputs).
std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value, const AttentionOptions& options = {});

// The scores themselves, [B, Hq, Lq, Lkv], for plots, tests and study: stage "scaled", "capped" (all keys), "masked"
// (-inf where excluded) or "probs" (before dropout). Stage "named" gives the probabilities at only the keys of
// key_index, [B, Hq, Lq, n * key_block] in its order: 0 for -1, and after the first place of a number that stands
// twice. It holds the scores of some rows at a time.
at::Tensor attention_scores(const at::Tensor& query, const at::Tensor& key, const AttentionOptions& options = {},
                            const std::string& stage = "probs");

}  // namespace attnpack
