#pragma once

#include "cuda_problem.h"

// Include catch.h first.
//
// The gradients of a drawn problem by the formula in fp64.
namespace attnpack::cuda {

// A sum, and the sum of its terms' sizes, which is the unit of rounding errors.
struct Sum {
  double value = 0, size = 0;
  void add(double term, double size_of_term) {
    value += term;
    size += std::abs(size_of_term);
  }
};
using Matrix = std::vector<Sum>;

// Gradients by the formula, in fp64.
template <class S>
struct Gradients {
  Matrix query, key, value, scores;
  explicit Gradients(Problem<S>& x) {
    const Shape& s = x.shape;
    query.resize(s.batch * x.num_heads * s.q_len * s.head_dim);
    key.resize(s.batch * s.num_kv_heads * s.kv_len * s.head_dim);
    value.resize(s.batch * s.num_kv_heads * s.kv_len * s.v_head_dim);
    scores.resize(s.batch * x.num_heads * s.q_len * s.kv_len);
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < x.num_heads; ++h)
        for (int64_t i = 0; i < s.q_len; ++i) add_row(x, b, h, i);
  }

  void add_row(Problem<S>& x, int64_t b, int64_t h, int64_t i) {
    const Shape& s = x.shape;
    const int64_t kv = x.kv_head_of(h), row = (b * x.num_heads + h) * s.q_len + i, head = b * s.num_kv_heads + kv;
    const auto truth = x.row(b, h, i);
    double delta = 0;
    for (int64_t d = 0; d < s.v_head_dim; ++d) delta += widened(x.grad_out.at(b, h, i, d)) * truth.out[d];
    x.lse[row] = static_cast<typename Problem<S>::A>(truth.lse);
    x.delta[row] = static_cast<typename Problem<S>::A>(delta);
    for (int64_t j = 0; j < s.kv_len; ++j) {
      if (!x.sees(b, h, i, j)) continue;
      Sum grad;
      for (int64_t d = 0; d < s.v_head_dim; ++d) {
        const double term = widened(x.grad_out.at(b, h, i, d)) * x.v(b, kv, j, d);
        grad.add(term, term);
      }
      const double probability = truth.probs[j], kept = probability * truth.kept[j];
      const double ds = probability * (truth.kept[j] * grad.value - delta);
      const double size = probability * (truth.kept[j] * grad.size + std::abs(delta));
      const double factor = truth.slope[j] * x.p.scale;
      scores[row * s.kv_len + j].add(ds, size);
      for (int64_t d = 0; d < s.head_dim; ++d) {
        const double k = factor * x.k(b, kv, j, d), q = factor * x.q(b, h, i, d);
        query[row * s.head_dim + d].add(ds * k, size * k);
        key[(head * s.kv_len + j) * s.head_dim + d].add(ds * q, size * q);
      }
      for (int64_t d = 0; d < s.v_head_dim; ++d) {
        const double term = kept * widened(x.grad_out.at(b, h, i, d));
        value[(head * s.kv_len + j) * s.v_head_dim + d].add(term, term);
      }
    }
  }
};

// Weights and results are rounded to the storage type, by up to two units each. fp32 and fp64 see the error of long
// sums.
template <class S>
constexpr double kUnits = sizeof(S) == 2 ? 4.1 : 100;

template <class S>
void compare(Tensor4<S>& got, const Matrix& wanted, int64_t batch) {
  const double least = std::is_same_v<S, Float16> ? 0x1p-22 : 1e-37;  // rounding of the smallest weights and results
  double worst = 0;
  int64_t wrong = 0, n = 0;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < got.heads; ++h)
      for (int64_t l = 0; l < got.length; ++l)
        for (int64_t d = 0; d < got.width; ++d, ++n) {
          const double x = widened(got.at(b, h, l, d));
          if (!std::isfinite(x))
            wrong += std::isnan(x) ? !std::isnan(wanted[n].value) : x != wanted[n].value;
          else if (!std::isfinite(wanted[n].value))
            ++wrong;
          else
            worst = std::max(worst, std::abs(x - wanted[n].value) / (unit<S>() * wanted[n].size + least));
        }
  CHECK(wrong == 0);
  CHECK(worst < kUnits<S>);
}

}  // namespace attnpack::cuda
