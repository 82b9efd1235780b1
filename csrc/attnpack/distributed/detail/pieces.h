#pragma once

#include <attnpack/distributed/layouts.h>
#include <attnpack/ops/attention.h>

#include <optional>
#include <tuple>

namespace attnpack::distributed {

// Attention between pieces of one sequence: the operator's rules at the places that the pieces have in the whole.
// The kv_lens among the rules are those of the whole sequence.

// Whether any row may attend any of the keys, as far as positions say.
bool sees(const AttentionOptions& rules, const Piece& rows, const Piece& keys);

// (out [B, Hq, rows, Dv], lse [B, Hq, rows]) of query rows over keys at their positions.
std::tuple<at::Tensor, at::Tensor> attend_piece(const at::Tensor& query,  // [B, Hq, rows, D]
                                                const at::Tensor& key,    // [B, Hkv, keys, D]
                                                const at::Tensor& value,  // [B, Hkv, keys, Dv]
                                                const AttentionOptions& rules, const Piece& rows, const Piece& keys);

// The rows in backward: their query, and results and gradients over the keys of all pieces.
struct RowsBefore {
  at::Tensor query;                    // [B, Hq, rows, D]
  at::Tensor out;                      // [B, Hq, rows, Dv]
  at::Tensor lse;                      // [B, Hq, rows]
  at::Tensor grad_out;                 // [B, Hq, rows, Dv]
  std::optional<at::Tensor> grad_lse;  // [B, Hq, rows]
};

// Gradients of one piece of keys; sinks' is undefined without sinks.
struct PieceGradients {
  at::Tensor query, key, value, sinks;
};

// By the CPU's kernel, which takes what all keys of a row share from out and lse.
PieceGradients backward_by_kernel(const RowsBefore& before, const at::Tensor& key, const at::Tensor& value,
                                  const AttentionOptions& rules, const Piece& rows, const Piece& keys);
// By the derivative of the join, for any device: a part with lse p of all keys' lse weighs exp(p - lse).
PieceGradients backward_by_join(const RowsBefore& before, const at::Tensor& key, const at::Tensor& value,
                                const AttentionOptions& rules, const Piece& rows, const Piece& keys);

}  // namespace attnpack::distributed
