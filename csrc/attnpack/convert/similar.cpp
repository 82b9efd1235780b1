#include <attnpack/convert/similar.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <attnpack/convert/detail/calibration.h>
#include <attnpack/core/check.h>

#include <algorithm>

namespace attnpack::convert {

namespace {

at::Tensor pair_distances(const at::Tensor& heads, const at::Tensor& moment) {  // [H, D, E], [E, E]
  const auto read = at::matmul(heads, moment).flatten(1), flat = heads.flatten(1);
  const auto gram = at::matmul(flat, read.t());  // sum over D of E[y_i y_j]
  const auto squares = gram.diagonal();
  return (squares.unsqueeze(0) + squares.unsqueeze(1) - gram - gram.t()) / squares.mean().clamp_min(1e-300);
}

class Partition {
 public:
  Partition(const at::Tensor& distances, Groups groups)
      : groups(std::move(groups)), distances_(distances.contiguous()), at_(distances_.accessor<double, 2>()) {}

  Groups groups;

  double cost(const std::vector<int64_t>& group) const {
    double sum = 0;
    for (size_t i = 0; i < group.size(); ++i) {
      for (size_t j = 0; j < i; ++j) sum += at_[group[i]][group[j]];
    }
    return group.empty() ? 0 : sum / static_cast<double>(group.size());
  }

  // Tries to exchange two heads between groups a and b, or to move one. Returns whether it did.
  bool improve(size_t a, size_t b, bool uneven) {
    const auto before = cost(groups[a]) + cost(groups[b]);
    const auto better = [&](const std::vector<int64_t>& left, const std::vector<int64_t>& right) {
      if (cost(left) + cost(right) >= before * (1 - 1e-12)) return false;
      groups[a] = left, groups[b] = right;
      return true;
    };
    for (size_t i = 0; i < groups[a].size(); ++i) {
      for (size_t j = 0; j < groups[b].size(); ++j) {
        auto left = groups[a], right = groups[b];
        std::swap(left[i], right[j]);
        if (better(left, right)) return true;
      }
      if (uneven && groups[a].size() > 1) {
        auto left = groups[a], right = groups[b];
        right.push_back(left[i]);
        left.erase(left.begin() + static_cast<int64_t>(i));
        if (better(left, right)) return true;
      }
    }
    return false;
  }

 private:
  at::Tensor distances_;
  at::TensorAccessor<double, 2> at_;
};

}  // namespace

at::Tensor head_distances(const AttentionWeights& weights, int64_t num_kv_heads, const Calibration& calibration) {
  const at::NoGradGuard no_grad;
  const auto inputs = resolve_calibration(calibration);
  const auto distances = [&](const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& rows) {
    const auto heads = with_bias(weight, bias).unflatten(0, {num_kv_heads, -1});
    return pair_distances(heads, second_moment(rows, heads.size(2), bias.defined(), heads));
  };
  return (distances(weights.k, weights.k_bias, inputs.context) +
          distances(weights.v, weights.v_bias, inputs.value_context))
      .cpu();
}

Groups choose_groups(const at::Tensor& distances, int64_t num_kv_heads, bool uneven) {
  ATTNPACK_CHECK(distances.dim() == 2 && distances.size(0) == distances.size(1), "distances: got shape ",
                 distances.sizes(), ", want [heads, heads]");
  const auto num_heads = distances.size(0);
  ATTNPACK_CHECK(num_kv_heads >= 1 && num_kv_heads <= num_heads, "num_kv_heads: got ", num_kv_heads, ", want 1 to ",
                 num_heads);
  ATTNPACK_CHECK(uneven || num_heads % num_kv_heads == 0, "num_kv_heads: got ", num_kv_heads,
                 ", which does not divide the ", num_heads, " heads there are");
  Partition partition(distances.to(at::kCPU, at::kDouble), consecutive_groups(num_heads, num_kv_heads));
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t a = 0; a < partition.groups.size(); ++a) {
      for (size_t b = 0; b < partition.groups.size(); ++b) {
        if (a != b) changed = partition.improve(a, b, uneven) || changed;
      }
    }
  }
  for (auto& group : partition.groups) std::sort(group.begin(), group.end());
  std::sort(partition.groups.begin(), partition.groups.end());
  return partition.groups;
}

}  // namespace attnpack::convert
