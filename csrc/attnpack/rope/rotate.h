#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <attnpack/rope/scaling.h>

#include <optional>
#include <tuple>

namespace attnpack {

// Rotates the first r dims of x [B, H, L, D] at positions, int64 [L] or [B, L]. lengths [B]: the length of each
// sequence, for frequencies that follow it; default: the sequence's highest position + 1.
at::Tensor rotate_at(const at::Tensor& x, const RopeSettings& rope, const at::Tensor& positions,
                     const std::optional<at::Tensor>& lengths = std::nullopt);

// Raises unless positions, if given, are int64 [length] or [batch, length].
void check_positions(const std::optional<at::Tensor>& positions, const c10::SymInt& batch, const c10::SymInt& length);
// The same, with the batch and the length of query [B, H, L, D].
void check_positions(const std::optional<at::Tensor>& positions, const at::Tensor& query);

// Where the new tokens of a layer stand.
struct Placement {
  std::optional<at::Tensor> positions;  // int64 [L] or [B, L]; default: after the past, else 0..L-1
  bool cross = false;                   // keys come from another sequence, and stand at 0..Lkv-1
  std::optional<at::Tensor> past;       // [B] int64, lengths of the cache before the call
  std::optional<at::Tensor> new_lens;   // [B], valid new tokens of each sequence (cross: valid keys); default all
  std::optional<at::Tensor> keys_at;    // int64 [Lkv], with cross; default 0..Lkv-1
};

// Rotates query and key at their positions. Keys that a cache will hold raw come back unrotated. Context keys rotate by
// the length of the context.
std::tuple<at::Tensor, at::Tensor> rotate_new(const at::Tensor& query,  // [B, Hq, L, D]
                                              const at::Tensor& key,    // [B, Hkv, Lkv, D]
                                              const RopeSettings& rope, const Placement& place);

// Rotates a cache's raw keys, by the lengths after the append. Keys that were stored rotated stay as they are.
at::Tensor rotate_cached(const at::Tensor& key,      // [B, Hkv, capacity, D]
                         const at::Tensor& lengths,  // [B] int64
                         const RopeSettings& rope,
                         const std::optional<at::Tensor>& positions = std::nullopt);  // [B, capacity]; 0..capacity-1

}  // namespace attnpack
