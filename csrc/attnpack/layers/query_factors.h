#pragma once

#include <ATen/core/Tensor.h>
#include <attnpack/ops/option_list.h>

#include <optional>
#include <string>

namespace attnpack {

// How the scores of a query grow with its position p, a dict as in Hugging Face configs. Its types:
//   "llama4": log1p(floor((p + 1) / floor_scale)) * attn_scale + 1 (Llama 4, on its layers without RoPE; Nakanishi
//             2025, arXiv 2501.19399); p counts the tokens of the cache, whatever positions say,
//   "log":    1 + llama_4_scaling_beta * log(1 + floor(p / original_max_position_embeddings)) (Ministral 3, Mistral 4);
//             p is the position that RoPE takes.
struct QueryScale : OptionList<QueryScale> {
  ATTNPACK_OPTION(std::string, type);
  ATTNPACK_OPTION(std::optional<double>, floor_scale);
  ATTNPACK_OPTION(std::optional<double>, attn_scale);
  ATTNPACK_OPTION(std::optional<double>, llama_4_scaling_beta);
  ATTNPACK_OPTION(std::optional<double>, original_max_position_embeddings);
};

// Raises for an unknown type, and for a number that is missing or that its type does not have.
void check_query_scale_options(const std::optional<QueryScale>& scale);

// The factors of query_scale (ops/score_rules.h), fp32 in the shape of the positions that count: of type "log" those
// that are given, if there are some.
at::Tensor query_factors(const at::Tensor& counted,               // int64 [L] or [B, L], after the tokens of the cache
                         const std::optional<at::Tensor>& given,  // int64 [L] or [B, L], for RoPE
                         const c10::SymInt& batch, const QueryScale& scale);

}  // namespace attnpack
