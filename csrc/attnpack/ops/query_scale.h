#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace attnpack {

// Refuses factors that do not fit the query.
void check_query_scale(const at::Tensor& query, const std::optional<at::Tensor>& query_scale);

// The queries times the factor of each position, which multiplies their scores as it multiplies them; differentiable.
// Computed in fp32 at least, rounded once to query's dtype. Without factors the query itself.
at::Tensor scale_queries(const at::Tensor& query,                        // [B, H, L, D], or packed [T, H, D]
                         const std::optional<at::Tensor>& query_scale);  // [L] or [B, L], or packed [T]

}  // namespace attnpack
