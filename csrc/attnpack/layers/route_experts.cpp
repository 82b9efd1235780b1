#include <attnpack/layers/route_experts.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {

namespace {

using at::Tensor;

// The scores, -inf for experts outside the best groups.
Tensor in_best_groups(const Tensor& scores, int64_t num_experts, const RouteOptions& o) {
  const auto grouped = scores.unflatten_symint(-1, {o.num_groups, num_experts / o.num_groups});
  const int64_t counted = o.scores == "sigmoid" ? 2 : 1;
  const auto worth = std::get<0>(grouped.topk(counted, -1)).sum(-1);
  const auto best = std::get<1>(worth.topk(o.top_groups, -1));
  const auto chosen = at::zeros_like(worth, worth.options().dtype(at::kBool)).scatter(-1, best, true);
  const auto outside = chosen.logical_not().unsqueeze(-1);
  return grouped.masked_fill(outside, -std::numeric_limits<double>::infinity()).flatten(-2);
}

std::tuple<Tensor, Tensor> route(const Tensor& logits, const std::optional<Tensor>& correction, c10::string_view scores,
                                 int64_t top_k, bool normalize, double scaling, int64_t num_groups,
                                 int64_t top_groups) {
  const RouteOptions o{std::string(scores), top_k, normalize, scaling, num_groups, top_groups};
  const int64_t num_experts = logits.sym_size(-1).guard_int(__FILE__, __LINE__);
  check_route(o, num_experts);
  const auto all = o.scores == "sigmoid" ? logits.sigmoid() : logits.softmax(-1);
  auto choice = all.detach();
  if (correction) choice = choice + correction->detach();
  if (num_groups > 1) choice = in_best_groups(choice, num_experts, o);
  const auto index = std::get<1>(choice.topk(top_k, -1));
  auto weights = all.gather(-1, index);
  if (normalize) weights = weights / (weights.sum(-1, /*keepdim=*/true) + 1e-20);
  return {weights * scaling, index};
}

}  // namespace

void check_route(const RouteOptions& o, int64_t num_experts) {
  ATTNPACK_CHECK(o.scores == "softmax" || o.scores == "sigmoid", "scores: got '", o.scores,
                 "', want 'softmax' or 'sigmoid'");
  ATTNPACK_CHECK(o.num_groups >= 1 && num_experts % o.num_groups == 0, "num_groups: got ", o.num_groups,
                 ", want a number that divides num_experts ", num_experts);
  ATTNPACK_CHECK(o.top_groups >= 1 && o.top_groups <= o.num_groups, "top_groups: got ", o.top_groups,
                 ", want 1 to num_groups ", o.num_groups);
  const int64_t in_group = num_experts / o.num_groups;
  ATTNPACK_CHECK(o.num_groups == 1 || o.scores == "softmax" || in_group >= 2, "num_groups: got ", o.num_groups, " for ",
                 num_experts, " experts, want at least two in a group: a group is as good as its two best");
  ATTNPACK_CHECK(o.top_k >= 1 && o.top_k <= o.top_groups * in_group, "top_k: got ", o.top_k, ", want 1 to ",
                 o.top_groups * in_group, ", the experts to choose from");
}

std::tuple<Tensor, Tensor> route_experts(const Tensor& logits, const std::optional<Tensor>& correction,
                                         const RouteOptions& o) {
  static const DispatchedOp<decltype(route)> op("attnpack::route_experts");
  return op(logits, correction, o.scores, o.top_k, o.normalize, o.scaling, o.num_groups, o.top_groups);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def(
      "route_experts(Tensor logits, Tensor? correction, str scores, int top_k, bool normalize, float scaling, int "
      "num_groups, int top_groups) -> (Tensor, Tensor)",
      attnpack::route);
}
