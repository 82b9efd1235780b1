#include <attnpack/ops/key_products.h>

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {

using at::Tensor;
using c10::SymInt;

namespace {

void check_key_products(const Tensor& query, const Tensor& key) {
  ATTNPACK_CHECK(query.dim() == 4 && query.is_floating_point(), "query has shape ", query.sym_sizes(), " and dtype ",
                 query.scalar_type(), ", wants floating numbers [batch, heads, length, head_dim]");
  ATTNPACK_CHECK(
      key.dim() == 4 && key.is_floating_point() && key.sym_size(0) == query.sym_size(0) &&
          key.sym_size(3) == query.sym_size(3) && key.sym_size(1) >= 1 && query.sym_size(1) % key.sym_size(1) == 0,
      "key has shape ", key.sym_sizes(), " and dtype ", key.scalar_type(), ", wants floating numbers [",
      query.sym_size(0), ", a number that divides ", query.sym_size(1), ", kv_len, ", query.sym_size(3), "]");
  ATTNPACK_CHECK(key.device() == query.device(), "key is on ", key.device(), ", query on ", query.device(),
                 ": move one of them with .to()");
}

}  // namespace

Tensor key_products(const Tensor& query, const Tensor& key) {
  static const DispatchedOp<decltype(key_products)> op("attnpack::key_products");
  return op(query.detach(), key.detach());
}

// The rows of a group are rows of one matrix: a plain matmul would copy the keys for each head.
Tensor key_products_formula(const Tensor& query, const Tensor& key) {
  check_key_products(query, key);
  // Autocast would round the products.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto wide = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const SymInt kv_heads = key.sym_size(1), group = query.sym_size(1) / kv_heads, length = query.sym_size(2);
  const Tensor rows = query.to(wide).unflatten_symint(1, {kv_heads, group}).flatten(2, 3);
  return at::matmul(rows, key.to(wide).transpose(2, 3)).unflatten_symint(2, {group, length}).flatten(1, 2);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) { m.def("key_products(Tensor query, Tensor key) -> Tensor"); }
