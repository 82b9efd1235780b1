#include <attnpack/convert/fused.h>

#include <ATen/ATen.h>

#include <attnpack/core/padded.h>

namespace attnpack::convert {

namespace {

void check_fused(const std::string& layout, int64_t num_heads, int64_t num_kv_heads) {
  ATTNPACK_CHECK(layout == "concat" || layout == "grouped" || layout == "conv1d", "layout: got '", layout,
                 "', want 'concat', 'grouped' or 'conv1d'");
  ATTNPACK_CHECK(num_heads >= 1 && num_kv_heads >= 1 && num_heads % num_kv_heads == 0, "num_kv_heads: got ",
                 num_kv_heads, ", want a divisor of num_heads ", num_heads);
}

bool transposed(const at::Tensor& weight, const std::string& layout) { return layout == "conv1d" && weight.dim() == 2; }

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> split_qkv(const at::Tensor& weight, const std::string& layout,
                                                         int64_t num_heads, int64_t num_kv_heads) {
  check_fused(layout, num_heads, num_kv_heads);
  check_defined("weight", weight);
  ATTNPACK_CHECK(weight.dim() == 1 || weight.dim() == 2, "weight: got shape ", weight.sizes(),
                 ", want a matrix or a bias");
  const auto rows = transposed(weight, layout) ? weight.t() : weight;
  const auto heads = num_heads + 2 * num_kv_heads;
  ATTNPACK_CHECK(rows.size(0) % heads == 0, "weight: got shape ", weight.sizes(), ", whose ", rows.size(0),
                 " rows of q, k and v are not those of ", num_heads, " query and twice ", num_kv_heads, " kv heads");
  const auto head_dim = rows.size(0) / heads, group = num_heads / num_kv_heads;
  std::vector<at::Tensor> parts;
  if (layout == "grouped") {
    parts = rows.unflatten(0, {num_kv_heads, group + 2, head_dim}).split_with_sizes({group, 1, 1}, 1);
    for (auto& part : parts) part = part.flatten(0, 2);
  } else {
    parts = rows.split_with_sizes({num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim});
  }
  return {parts[0].clone(at::MemoryFormat::Contiguous), parts[1].clone(at::MemoryFormat::Contiguous),
          parts[2].clone(at::MemoryFormat::Contiguous)};
}

at::Tensor fuse_qkv(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::string& layout,
                    int64_t num_heads, int64_t num_kv_heads) {
  check_fused(layout, num_heads, num_kv_heads);
  check_defined("q", q);
  check_defined("k", k);
  check_defined("v", v);
  ATTNPACK_CHECK((q.dim() == 1 || q.dim() == 2) && q.size(0) % num_heads == 0, "q: got shape ", q.sizes(),
                 ", want the rows of num_heads = ", num_heads, " heads");
  auto wanted = q.sizes().vec();
  wanted[0] = q.size(0) / num_heads * num_kv_heads;
  ATTNPACK_CHECK(k.sizes() == wanted, "k: got shape ", k.sizes(), ", want ", at::IntArrayRef(wanted), " beside q ",
                 q.sizes());
  ATTNPACK_CHECK(v.sizes() == wanted, "v: got shape ", v.sizes(), ", want ", at::IntArrayRef(wanted), " beside q ",
                 q.sizes());
  ATTNPACK_CHECK(q.dtype() == k.dtype() && q.dtype() == v.dtype(), "v: got dtypes ", q.dtype(), ", ", k.dtype(),
                 " and ", v.dtype(), " of q, k and v, want one; convert them first");
  if (layout != "grouped") {
    const auto rows = at::cat({q, k, v});
    return transposed(rows, layout) ? rows.t().contiguous() : rows;
  }
  const auto by_group = [&](const at::Tensor& rows, int64_t heads) {
    return rows.unflatten(0, {num_kv_heads, heads / num_kv_heads, -1});
  };
  return at::cat({by_group(q, num_heads), by_group(k, num_kv_heads), by_group(v, num_kv_heads)}, 1).flatten(0, 2);
}

}  // namespace attnpack::convert
