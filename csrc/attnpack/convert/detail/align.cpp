#include <attnpack/convert/detail/align.h>

#include <ATen/ATen.h>

#include <attnpack/convert/detail/calibration.h>
#include <attnpack/convert/detail/rope_pair.h>

#include <cmath>

namespace attnpack::convert {

namespace {

using at::indexing::Slice;

// The Hermitian square roots of matrices [n, d, d] and their (pseudo-)inverses, scaled to a mean trace of d.
std::pair<at::Tensor, at::Tensor> metric_roots(const at::Tensor& metric) {
  auto [values, vectors] = at::linalg_eigh(metric);
  values = values.clamp_min(0);
  const auto mean = values.mean().item<double>();
  values = mean > 0 ? values / mean : at::ones_like(values);
  const auto root = values.sqrt();
  const auto inverse = at::where(values > 1e-12, 1 / root, at::zeros_like(root));
  const auto product = [&, &vectors = vectors](const at::Tensor& diagonal) {
    return at::matmul(vectors * diagonal.unsqueeze(-2), vectors.mH());
  };
  return {product(root), product(inverse)};
}

// One layer's weights by head in fp64, with biases as a last column, and the place for the result.
class Aligner {
 public:
  Aligner(const AttentionWeights& weights, const std::vector<int64_t>& head_map, const MergeOptions& o)
      : options_(o),
        head_map_(head_map),
        inputs_(resolve_calibration(o.calibration())),
        q_(with_bias(weights.q, weights.q_bias).unflatten(0, {o.num_heads(), -1}).clone()),
        k_(with_bias(weights.k, weights.k_bias).unflatten(0, {o.num_kv_heads(), -1})),
        v_(with_bias(weights.v, weights.v_bias).unflatten(0, {o.num_kv_heads(), -1})),
        o_(weights.o.to(at::kDouble).unflatten(1, {o.num_heads(), -1}).transpose(0, 1).clone()),
        x_moment_(second_moment(inputs_.x, q_.size(2), weights.q_bias.defined(), q_)),
        k_moment_(second_moment(inputs_.context, k_.size(2), weights.k_bias.defined(), k_)),
        v_moment_(second_moment(inputs_.value_context, v_.size(2), weights.v_bias.defined(), v_)) {}

  AttentionWeights merge(const AttentionWeights& weights, const Groups& groups) {
    std::vector<at::Tensor> keys, values;
    for (const auto& group : groups) {
      keys.push_back(group.size() == 1 ? k_[group[0]] : merge_keys(group));
      values.push_back(group.size() == 1 ? v_[group[0]] : merge_values(group));
    }
    auto result = weights;
    unpack(q_, result.q, result.q_bias);
    unpack(at::stack(keys), result.k, result.k_bias);
    unpack(at::stack(values), result.v, result.v_bias);
    result.o = o_.transpose(0, 1).flatten(1).to(weights.o.scalar_type());
    return result;
  }

 private:
  // Writes [H, D, E], or [H, D, E + 1], into a weight and a bias of the dtypes that they have.
  static void unpack(const at::Tensor& heads, at::Tensor& weight, at::Tensor& bias) {
    const auto rows = heads.flatten(0, 1);
    if (bias.defined()) bias = rows.select(1, -1).to(bias.scalar_type()).contiguous();
    weight = rows.narrow(1, 0, weight.size(1)).to(weight.scalar_type()).contiguous();
  }

  template <typename Visit>
  void for_each_reader(const std::vector<int64_t>& group, const Visit& visit) {
    for (size_t i = 0; i < group.size(); ++i) {
      for (size_t h = 0; h < head_map_.size(); ++h) {
        if (head_map_[h] == group[i]) visit(static_cast<int64_t>(i), static_cast<int64_t>(h));
      }
    }
  }

  static at::Tensor select_heads(const at::Tensor& heads, const std::vector<int64_t>& group) {
    return heads.index_select(0, at::tensor(group, at::kLong).to(heads.device()));
  }

  at::Tensor merge_values(const std::vector<int64_t>& group) {
    const auto heads = select_heads(v_, group);
    auto metric = at::zeros({heads.size(0), heads.size(1), heads.size(1)}, heads.options());
    for_each_reader(group, [&](int64_t i, int64_t h) { metric[i] += at::matmul(o_[h].t(), o_[h]); });
    const auto shared = share_heads(heads, metric, v_moment_);
    for_each_reader(group, [&](int64_t i, int64_t h) { o_[h].copy_(at::matmul(o_[h], shared.maps[i])); });
    return shared.rows;
  }

  at::Tensor merge_keys(const std::vector<int64_t>& group) {
    const auto heads = select_heads(k_, group);
    if (options_.key_norm()) return heads.mean(0);
    auto merged = at::empty_like(heads[0]);
    const auto half = options_.rope_dim() / 2, head_dim = heads.size(1);
    for (int64_t p = 0; p < half; ++p) {
      const RopePair pair(p, options_.rope_dim(), options_.interleaved());
      auto metric = at::zeros({heads.size(0), 1, 1}, heads.options().dtype(at::kComplexDouble));
      for_each_reader(group, [&](int64_t i, int64_t h) { metric[i] += output_moment(pair.get(q_[h]), x_moment_); });
      const auto shared = share_heads(pair.get(heads), metric, k_moment_);
      pair.set(merged, shared.rows);
      // Re(q conj(a k)) = Re((conj(a) q) conj(k))
      for_each_reader(group, [&](int64_t i, int64_t h) { pair.set(q_[h], pair.get(q_[h]) * shared.maps[i].conj()); });
    }
    if (2 * half < head_dim) {
      const auto still = Slice(2 * half, head_dim);
      const auto part = heads.index({Slice(), still});
      auto metric = at::zeros({part.size(0), part.size(1), part.size(1)}, part.options());
      for_each_reader(group,
                      [&](int64_t i, int64_t h) { metric[i] += output_moment(q_[h].index({still}), x_moment_); });
      const auto shared = share_heads(part, metric, k_moment_);
      merged.index_put_({still}, shared.rows);
      for_each_reader(group, [&](int64_t i, int64_t h) {
        q_[h].index_put_({still}, at::matmul(shared.maps[i].t(), q_[h].index({still})));
      });
    }
    return merged;
  }

  const MergeOptions& options_;
  const std::vector<int64_t>& head_map_;
  Calibration inputs_;
  at::Tensor q_, k_, v_;  // [H, D, E], biases as a last column
  at::Tensor o_;          // [Hq, E, Dv]
  at::Tensor x_moment_, k_moment_, v_moment_;
};

}  // namespace

SharedRows leading_rows(const at::Tensor& heads, const at::Tensor& metric, const at::Tensor& moment, int64_t rank) {
  const auto n = heads.size(0), d = heads.size(1);
  const auto [root, inverse] = metric_roots(metric);
  const auto weighted = at::matmul(root, heads).flatten(0, 1);                 // [n d, E]
  auto basis = std::get<1>(at::linalg_eigh(output_moment(weighted, moment)));  // [n d, n d], the largest come last
  basis = basis.narrow(1, n * d - rank, rank);
  return {at::matmul(basis.mH(), weighted), at::matmul(inverse, basis.unflatten(0, {n, d})), basis};
}

SharedRows share_heads(const at::Tensor& heads, const at::Tensor& metric, const at::Tensor& moment) {
  const auto n = heads.size(0), d = heads.size(1);
  const auto lead = leading_rows(heads, metric, moment, d);
  // Any unitary rotation of the basis serves as well. The polar factor of the sum of the basis' blocks is rotated away.
  const auto [u, s, vh] = at::linalg_svd(lead.basis.unflatten(0, {n, d}).sum(0));
  const auto rotation = at::matmul(vh.mH(), u.mH());
  const auto scale = std::sqrt(static_cast<double>(n));
  return {at::matmul(rotation.mH(), lead.rows) / scale, at::matmul(lead.maps, rotation) * scale,
          at::matmul(lead.basis, rotation)};
}

AttentionWeights align_heads(const AttentionWeights& weights, const std::vector<int64_t>& head_map,
                             const Groups& groups, const MergeOptions& options) {
  return Aligner(weights, head_map, options).merge(weights, groups);
}

}  // namespace attnpack::convert
