#include <attnpack/convert/merge_heads.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <attnpack/convert/detail/align.h>
#include <attnpack/convert/pool.h>
#include <attnpack/convert/similar.h>
#include <attnpack/core/padded.h>

#include <algorithm>
#include <numeric>

namespace attnpack::convert {

namespace {

// The same weights with k and v pooled. Each tensor has draws of its own.
AttentionWeights pool_layer(const AttentionWeights& weights, const Groups& groups, const MergeOptions& o) {
  auto result = weights;
  uint64_t draw = 0;
  for (auto* tensor : {&result.k, &result.v, &result.k_bias, &result.v_bias}) {
    if (!tensor->defined()) continue;
    auto options = PoolOptions().method(o.method() == "similar" ? "mean" : o.method()).window(o.window());
    if (o.seed()) options.seed(*o.seed() + draw++);
    *tensor = pool_kv_heads(*tensor, o.num_kv_heads(), o.new_kv_heads(), options.groups(groups));
  }
  return result;
}

void reorder_queries(MergedHeads& merged, int64_t num_heads) {
  auto& [weights, map, order, groups] = merged;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto readers = std::count(map.begin(), map.end(), static_cast<int64_t>(g));
    ATTNPACK_CHECK(readers * static_cast<int64_t>(groups.size()) == num_heads, "groups: got one that ", readers,
                   " query heads read, want ", num_heads, " / ", groups.size(),
                   " for each: consecutive heads cannot share a kv head otherwise");
  }
  std::stable_sort(order.begin(), order.end(), [&map = map](int64_t a, int64_t b) { return map[a] < map[b]; });
  if (std::is_sorted(order.begin(), order.end())) return;
  std::sort(map.begin(), map.end());
  const auto index = at::tensor(order, at::kLong).to(weights.q.device());
  const auto by_head = [&](const at::Tensor& tensor, int64_t dim) {
    return tensor.unflatten(dim, {num_heads, -1}).index_select(dim, index).flatten(dim, dim + 1);
  };
  weights.q = by_head(weights.q, 0);
  if (weights.q_bias.defined()) weights.q_bias = by_head(weights.q_bias, 0);
  weights.o = by_head(weights.o, 1);
}

}  // namespace

void check_layer(const AttentionWeights& weights, const MergeOptions& o) {
  check_head_weight("q", weights.q, o.num_heads());
  check_head_weight("k", weights.k, o.num_kv_heads());
  check_head_weight("v", weights.v, o.num_kv_heads());
  const auto head_dim = weights.q.size(0) / o.num_heads(), v_head_dim = weights.v.size(0) / o.num_kv_heads();
  ATTNPACK_CHECK(weights.k.size(0) == o.num_kv_heads() * head_dim, "k: got shape ", weights.k.sizes(), ", want ",
                 o.num_kv_heads() * head_dim, " rows, num_kv_heads of head_dim ", head_dim);
  check_defined("o", weights.o);
  ATTNPACK_CHECK(weights.o.dim() == 2 && weights.o.size(1) == o.num_heads() * v_head_dim, "o: got shape ",
                 weights.o.sizes(), ", want [width, ", o.num_heads() * v_head_dim, "]");
  ATTNPACK_CHECK(o.rope_dim() >= 0 && o.rope_dim() <= head_dim && o.rope_dim() % 2 == 0, "rope_dim: got ", o.rope_dim(),
                 ", want an even number of at most head_dim ", head_dim);
  check_finite("q", weights.q), check_finite("k", weights.k), check_finite("v", weights.v);
  check_finite("q_bias", weights.q_bias), check_finite("k_bias", weights.k_bias);
  check_finite("v_bias", weights.v_bias), check_finite("o", weights.o);
}

MergedHeads merge_kv_heads(const AttentionWeights& weights, const MergeOptions& o) {
  const at::NoGradGuard no_grad;
  const auto& method = o.method();
  const bool chooses = method == "similar", aligns = method == "aligned";
  ATTNPACK_CHECK(chooses || aligns || method == "mean" || method == "first" || method == "random", "method: got '",
                 method, "', want 'mean', 'first', 'random', 'similar' or 'aligned'");
  ATTNPACK_CHECK(!chooses || !o.groups(),
                 "groups: got some for method 'similar', which chooses them itself; leave "
                 "them out, or take 'mean'");
  ATTNPACK_CHECK(!aligns || o.window() == 1, "window: got ", o.window(), " for method 'aligned', want 1");
  ATTNPACK_CHECK(!o.seed() || method == "random", "seed: got one for method '", method,
                 "', which draws nothing; leave it out");
  check_layer(weights, o);
  if (chooses || aligns) {
    check_numbers("q", weights.q), check_numbers("k", weights.k);
    check_numbers("v", weights.v), check_numbers("o", weights.o);
  }
  const auto source_map = kv_head_of_queries(o.num_heads(), o.num_kv_heads(), o.head_map());

  MergedHeads merged;
  if (chooses) {
    check_merge(o.num_kv_heads(), o.new_kv_heads());
    merged.groups = choose_groups(head_distances(weights, o.num_kv_heads(), o.calibration()), o.new_kv_heads(),
                                  o.num_kv_heads() % o.new_kv_heads() != 0);
  } else {
    merged.groups = resolve_groups(o.num_kv_heads(), o.new_kv_heads(), o.groups());
  }
  merged.weights = aligns ? align_heads(weights, source_map, merged.groups, o) : pool_layer(weights, merged.groups, o);
  const auto group = group_of_heads(merged.groups);
  for (const auto head : source_map) merged.head_map.push_back(group[head]);
  merged.head_order.resize(o.num_heads());
  std::iota(merged.head_order.begin(), merged.head_order.end(), 0);
  if (o.reorder()) reorder_queries(merged, o.num_heads());
  return merged;
}

}  // namespace attnpack::convert
