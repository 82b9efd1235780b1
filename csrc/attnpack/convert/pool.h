#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/convert/groups.h>
#include <torch/csrc/api/include/torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>

namespace attnpack::convert {

struct PoolOptions {
  // "mean" of a group's heads, its "first" head, or a new "random" one: normal, with the root mean square of weight.
  TORCH_ARG(std::string, method) = "mean";
  // w > 1: each w x w region of the whole matrix (run of w of a bias) first becomes its mean; w divides both sides.
  TORCH_ARG(int64_t, window) = 1;
  // The heads of each group, uneven allowed; default: consecutive heads.
  TORCH_ARG(std::optional<Groups>, groups);
  // The seed of "random"; default: torch's generator.
  TORCH_ARG(std::optional<uint64_t>, seed);
};

// The num_heads heads of a key or value projection as num_kv_heads (Ainslie et al. 2023, section 2.1). Computed in
// fp64, returned in weight's dtype and on its device; no gradient.
at::Tensor pool_kv_heads(const at::Tensor& weight,  // [num_heads * D, E], or a bias [num_heads * D]
                         int64_t num_heads, int64_t num_kv_heads, const PoolOptions& options = {});

// Raises for NaN and Inf, which would spread to all results. Undefined tensors and meta tensors pass.
void check_finite(const char* name, const at::Tensor& weight);

// Raises for a weight on meta, for a conversion that reads numbers.
void check_numbers(const char* name, const at::Tensor& weight);

// Raises unless weight is floating, [num_heads * D, E] or [num_heads * D].
void check_head_weight(const char* name, const at::Tensor& weight, int64_t num_heads);

}  // namespace attnpack::convert
