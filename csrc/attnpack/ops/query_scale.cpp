#include <attnpack/ops/query_scale.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/core/padded.h>
#include <attnpack/ops/detail/layout.h>

namespace attnpack {
namespace {

using at::Tensor;

// A query with another number of dimensions is refused by the operator, which names what it wants.
bool is_query(const Tensor& query) { return query.dim() == 3 || query.dim() == 4; }

void check_factors(const Tensor& query, const Tensor& factors) {
  if (!is_query(query)) return;
  const bool packed = query.dim() == 3;
  const auto length = query.sym_size(packed ? 0 : 2);
  const bool one_row = factors.dim() == 1 && factors.sym_size(0) == length;
  const bool of_sequences =
      factors.dim() == 2 && !packed && factors.sym_size(0) == query.sym_size(0) && factors.sym_size(1) == length;
  ATTNPACK_CHECK(one_row || of_sequences, "query_scale has shape ", factors.sym_sizes(), ", wants ",
                 packed ? "[tokens]" : "[q_len] or [batch, q_len]", " beside query ", query.sym_sizes(),
                 ": one factor per query");
  ATTNPACK_CHECK(at::isFloatingType(factors.scalar_type()), "query_scale has dtype ", factors.scalar_type(),
                 ", wants a float dtype: call .float() on it");
  ATTNPACK_CHECK(factors.device() == query.device(), "query_scale is on ", factors.device(), ", query on ",
                 query.device(), ": move one of them");
}

Tensor scale_queries_composite(const Tensor& query, const Tensor& query_scale) {
  check_factors(query, query_scale);
  if (!is_query(query)) return query;
  const auto accumulation = accumulation_type(query.scalar_type());
  Tensor factors = query_scale.to(accumulation).unsqueeze(-1);  // [..., L, 1]
  factors = query.dim() == 3 ? factors.unsqueeze(-1) : factors.unsqueeze(-3);
  return query.mul(factors).to(query.scalar_type());  // of a 16-bit query the product is in fp32
}

}  // namespace

void check_query_scale(const Tensor& query, const std::optional<Tensor>& query_scale) {
  if (!query_scale) return;
  check_dense("query_scale", *query_scale);
  check_factors(query, *query_scale);
}

Tensor scale_queries(const Tensor& query, const std::optional<Tensor>& query_scale) {
  if (!query_scale) return query;
  check_dense("query_scale", *query_scale);
  return scale_queries_composite(query, *query_scale);
}

}  // namespace attnpack

// For graphs that are traced from Python.
TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("scale_queries(Tensor query, Tensor query_scale) -> Tensor", &attnpack::scale_queries_composite);
}
