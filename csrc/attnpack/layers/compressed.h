#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace attnpack {

// The mathematics of DeepSeek-V4's layers (2026) after their projections. Tokens stand at 0..L-1. One key per token
// serves all heads, and is the value too. An entry stands for a window of `rate` tokens: keys of their own, which a
// query sees once the window is full. cos and sin [L, r/2] are those of the tokens' positions; they rotate the last r
// dims, and those of entry i by the angles of token i * rate.

// The entries of all full windows: sum_j softmax(gate + bias)_j * value_j over the tokens of a window, for each dim.
// With overlap the tensors have 2 * D numbers per token: the first D belong to the window's successor, the others to
// the window, so that an entry is made of two windows.
at::Tensor compress_tokens(const at::Tensor& value,  // [B, L, D], or with overlap [B, L, 2 * D]
                           const at::Tensor& gate,   // as value
                           const at::Tensor& bias,   // [rate, D], or with overlap [rate, 2 * D]
                           bool overlap = false);    // -> [B, L / rate, D]

// The rotation of an attention over entries.
struct EntryRotation {
  at::Tensor cos, sin;  // [L, r/2]
  bool interleaved = true;
  int64_t rate = 1;
};

// The entries that each query attends: the top_k by sum_h weights_h * relu(query_h key), of those that it sees.
at::Tensor name_entries(const at::Tensor& query,    // [B, H, L, D], before rotation
                        const at::Tensor& entries,  // [B, 1, n, D], before rotation
                        const at::Tensor& weights,  // [B, L, H]
                        int64_t top_k,
                        const EntryRotation& rotation);  // -> int32 [B, 1, L, min(top_k, n)], -1 for none

// Attention over the last `window` tokens and over the entries, in one softmax. The rotation of the values is undone at
// the position of the query.
at::Tensor attend_entries(const at::Tensor& query,                   // [B, H, L, D], before rotation
                          const at::Tensor& key,                     // [B, 1, L, D], before rotation
                          const std::optional<at::Tensor>& entries,  // [B, 1, n, D], before rotation
                          const std::optional<at::Tensor>& named,    // of name_entries; default all that a query sees
                          const at::Tensor& sinks,                   // [H]
                          int64_t window, std::optional<double> scale,
                          const EntryRotation& rotation);  // -> [B, L, H * D]

// A projection of each group of heads by its own rows: out_g = W_g joined_g.
at::Tensor project_groups(const at::Tensor& joined,  // [B, L, groups * W]
                          const at::Tensor& weight,  // [groups * R, W]
                          int64_t groups);           // -> [B, L, groups * R]

}  // namespace attnpack
