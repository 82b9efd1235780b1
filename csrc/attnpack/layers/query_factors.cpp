#include <attnpack/layers/query_factors.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/rope/rotate.h>

#include <cmath>

namespace attnpack {

void check_query_scale_options(const std::optional<QueryScale>& scale) {
  if (!scale) return;
  const bool llama4 = scale->type() == "llama4";
  ATTNPACK_CHECK(llama4 || scale->type() == "log", "query_scale: type is '", scale->type(),
                 "', wants 'llama4' or 'log'");
  const auto& size = llama4 ? scale->floor_scale() : scale->original_max_position_embeddings();
  const auto& growth = llama4 ? scale->attn_scale() : scale->llama_4_scaling_beta();
  const bool others = llama4 ? scale->llama_4_scaling_beta() || scale->original_max_position_embeddings()
                             : scale->floor_scale() || scale->attn_scale();
  const char* names =
      llama4 ? "floor_scale and attn_scale" : "original_max_position_embeddings and llama_4_scaling_beta";
  ATTNPACK_CHECK(size && growth && !others, "query_scale: type '", scale->type(), "' wants ", names,
                 ", and no other numbers");
  ATTNPACK_CHECK(std::isfinite(*size) && *size > 0 && std::isfinite(*growth), "query_scale: ", names, " are ", *size,
                 " and ", *growth, ", want a number of positions above 0 and a finite factor");
}

at::Tensor query_factors(const at::Tensor& counted, const std::optional<at::Tensor>& given, const c10::SymInt& batch,
                         const QueryScale& scale) {
  check_query_scale_options(scale);
  check_positions(given, batch, counted.sym_size(-1));
  // 1 + growth * log(1 + floor(p / size)); a position below 0, as some paddings have, counts as 0
  const auto grown = [](const at::Tensor& p, double size, double growth) {
    return p.to(at::kDouble).div(size).floor().clamp_min(0).log1p().mul(growth).add(1).to(at::kFloat);
  };
  if (scale.type() == "llama4") return grown(counted.add(1), *scale.floor_scale(), *scale.attn_scale());
  return grown(given.value_or(counted), *scale.original_max_position_embeddings(), *scale.llama_4_scaling_beta());
}

namespace {

// For graphs that are traced from Python: the dict of the options as keywords.
at::Tensor query_factors_of(const at::Tensor& counted, const std::optional<at::Tensor>& given, c10::SymInt batch,
                            c10::string_view type, std::optional<double> floor_scale, std::optional<double> attn_scale,
                            std::optional<double> llama_4_scaling_beta,
                            std::optional<double> original_max_position_embeddings) {
  return query_factors(counted, given, batch,
                       QueryScale()
                           .type(std::string(type))
                           .floor_scale(floor_scale)
                           .attn_scale(attn_scale)
                           .llama_4_scaling_beta(llama_4_scaling_beta)
                           .original_max_position_embeddings(original_max_position_embeddings));
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def(
      "query_factors(Tensor counted, Tensor? given, SymInt batch, str type, float? floor_scale=None, float? "
      "attn_scale=None, float? llama_4_scaling_beta=None, float? original_max_position_embeddings=None) -> Tensor",
      &attnpack::query_factors_of);
}
