#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include <attnpack/core/dropout.h>
#include <attnpack/core/head_groups.h>
#include <attnpack/ops/cuda/kernels/plan.h>

#include "guarded.h"
#include "widened.h"

// A drawn attention problem in one storage type, and its results by the formula in fp64.
namespace attnpack::cuda {

struct Shape {
  int64_t batch, num_kv_heads, group, q_len, kv_len, head_dim, v_head_dim;
};
// past: the window of the later queries lies after all keys. lowest: the float mask holds fp32's smallest number for
// two thirds of the keys. lowest_rows: it holds that number for all keys of every third row. That number excludes
// nothing. The bool mask is one row of keys per sequence. mask_heads, mask_rows: each head, each query has its own.
// mask_blocks: it leaves all, none or some of the keys of each 128.
struct Settings {
  bool causal = false, window = false, past = false, lens = false, offsets = false, softcap = false, sinks = false,
       alibi = false, bool_mask = false, float_mask = false, map = false, dropout = false, poison = false,
       latent = false, lowest = false, lowest_rows = false, mask_heads = false, mask_rows = false, mask_blocks = false;
};
// Many rules at once.
inline constexpr Settings kManyRules{.causal = true,
                                     .lens = true,
                                     .softcap = true,
                                     .sinks = true,
                                     .alibi = true,
                                     .float_mask = true,
                                     .map = true,
                                     .dropout = true,
                                     .poison = true};

// The unit of errors: the most that rounding costs in fp64 and fp32, and half of that in 16 bits.
template <class S>
double unit() {
  return std::is_same_v<S, double>     ? 0x1p-53
         : std::is_same_v<S, float>    ? 0x1p-24
         : std::is_same_v<S, BFloat16> ? 0x1p-9
                                       : 0x1p-12;
}

template <class S>
DType dtype_of() {
  if (std::is_same_v<S, double>) return DType::kFloat64;
  if (std::is_same_v<S, float>) return DType::kFloat32;
  return std::is_same_v<S, BFloat16> ? DType::kBFloat16 : DType::kFloat16;
}

// A [batch, heads, length, width] tensor stored [batch, length, heads, width], 16-byte aligned. The memory after it may
// not be touched.
template <class S>
struct Tensor4 {
  int64_t heads = 0, length = 0, width = 0;
  Guarded storage;
  Strides strides;
  Tensor4() = default;
  Tensor4(int64_t batch, int64_t heads, int64_t length, int64_t width)
      : heads(heads),
        length(length),
        width(width),
        storage((batch * heads * length * width * sizeof(S) + 15) / 16 * 16),
        strides{length * heads * width, width, heads * width, 1} {}
  S* data() { return static_cast<S*>(storage.data()); }
  S& at(int64_t b, int64_t h, int64_t l, int64_t d) {
    return data()[b * strides.batch + h * strides.head + l * strides.row + d];
  }
};

template <class S>
void use_gradients(AttentionBackwardParams& bp, Tensor4<S>& grad_out, Tensor4<S>& grad_query, Tensor4<S>& grad_key,
                   Tensor4<S>& grad_value) {
  bp.grad_out = grad_out.data();
  bp.grad_out_strides = grad_out.strides;
  bp.grad_query = grad_query.data();
  bp.grad_key = grad_key.data();
  bp.grad_value = grad_value.data();
  bp.grad_query_strides = grad_query.strides;
  bp.grad_key_strides = grad_key.strides;
  bp.grad_value_strides = grad_value.strides;
}

template <class S>
struct Problem {
  using A = typename Accumulation<S>::type;
  static constexpr double kInf = std::numeric_limits<double>::infinity();

  Shape shape;
  Settings on;
  AttentionBackwardParams bp{};
  AttentionParams& p = bp.forward;
  int64_t num_heads, most_group;
  Tensor4<S> query, key, value, out, grad_out, grad_query, grad_key, grad_value;
  std::vector<A> lse, delta, grad_scores;
  std::vector<int64_t> offsets, lens;
  std::vector<double> sinks, slopes;
  std::vector<char> bools;
  std::vector<float> floats;
  HeadGroups groups;
  std::mt19937 random;

  Problem(const Shape& shape, const Settings& on, int seed) : shape(shape), on(on), random(seed) {
    num_heads = shape.num_kv_heads * shape.group;
    most_group = shape.group;
    query = normal(num_heads, shape.q_len, shape.head_dim);
    key = normal(shape.num_kv_heads, shape.kv_len, shape.head_dim);
    value = normal(shape.num_kv_heads, shape.kv_len, shape.v_head_dim);
    grad_out = normal(num_heads, shape.q_len, shape.v_head_dim);
    out = Tensor4<S>(shape.batch, num_heads, shape.q_len, shape.v_head_dim);
    grad_query = Tensor4<S>(shape.batch, num_heads, shape.q_len, shape.head_dim);
    grad_key = Tensor4<S>(shape.batch, shape.num_kv_heads, shape.kv_len, shape.head_dim);
    grad_value = Tensor4<S>(shape.batch, shape.num_kv_heads, shape.kv_len, shape.v_head_dim);
    lse.assign(shape.batch * num_heads * shape.q_len, A(-7));
    fill_params();
    if (on.poison) poison();
  }

  double uniform() { return std::uniform_real_distribution<double>()(random); }

  Tensor4<S> normal(int64_t heads, int64_t length, int64_t width) {
    Tensor4<S> x(shape.batch, heads, length, width);
    std::normal_distribution<float> draw;
    for (int64_t i = 0; i < shape.batch * heads * length * width; ++i) narrow(A(draw(random)), x.data() + i);
    return x;
  }

  void fill_params() {
    p.batch = shape.batch;
    p.num_heads = num_heads;
    p.num_kv_heads = shape.num_kv_heads;
    p.q_len = shape.q_len;
    p.kv_len = shape.kv_len;
    p.head_dim = shape.head_dim;
    p.v_head_dim = shape.v_head_dim;
    p.dtype = dtype_of<S>();
    p.query = query.data();
    p.key = key.data();
    p.value = on.latent ? key.data() : value.data();
    p.query_strides = query.strides;
    p.key_strides = key.strides;
    p.value_strides = on.latent ? key.strides : value.strides;
    p.out = out.data();
    p.out_strides = out.strides;
    p.lse = lse.data();
    p.scale = shape.head_dim > 0 ? 1 / std::sqrt(static_cast<double>(shape.head_dim)) : 1;
    p.causal = on.causal;
    p.q_offset = on.causal ? shape.kv_len - shape.q_len : 0;
    p.window_left = on.window || on.past ? shape.kv_len / 3 : -1;
    p.window_right = on.window ? 2 : -1;
    if (on.past) p.q_offset = shape.kv_len + shape.kv_len / 3 - 2;
    if (on.softcap) p.softcap = 1.5;
    if (on.offsets) {
      for (int64_t b = 0; b < shape.batch; ++b) offsets.push_back(shape.kv_len / 2 - 3 * b - 2);
      p.q_offsets = offsets.data();
    }
    if (on.lens) {
      for (int64_t b = 0; b < shape.batch; ++b) lens.push_back(std::max<int64_t>(0, shape.kv_len - 1 - 17 * b));
      p.kv_lens = lens.data();
    }
    for (int64_t h = 0; h < num_heads; ++h) {
      sinks.push_back(0.3 * static_cast<double>(h) - 1);
      slopes.push_back(0.05 * static_cast<double>(h + 1));
    }
    if (on.sinks) p.sinks = sinks.data();
    if (on.alibi) p.alibi_slopes = slopes.data();
    if (on.map) {
      std::vector<int64_t> map;
      for (int64_t h = 0; h < num_heads; ++h) map.push_back(h * h % 3 % shape.num_kv_heads);
      groups = group_heads(map, shape.num_kv_heads);
      p.group_start = groups.start.data();
      p.group_heads = groups.heads.data();
      most_group = 0;
      for (int64_t h = 0; h < shape.num_kv_heads; ++h) most_group = std::max(most_group, group_size(p, h));
    }
    if (on.bool_mask) {
      const int64_t rows = on.mask_rows ? shape.q_len : 1, of_batch = (on.mask_heads ? num_heads : 1) * rows;
      for (int64_t i = 0; i < shape.batch * of_batch; ++i)
        for (int64_t j = 0; j < shape.kv_len; ++j) {
          const int64_t left = on.mask_blocks ? (j / 128 + i / of_batch) % 3 : 2;  // none, all, some
          bools.push_back(left == 2 ? uniform() < 0.7 : left == 1);
        }
      p.mask = bools.data();
      p.mask_dtype = DType::kBool;
      p.mask_strides = {of_batch * shape.kv_len, on.mask_heads ? rows * shape.kv_len : 0,
                        on.mask_rows ? shape.kv_len : 0, 1};
    }
    if (on.float_mask) {  // [num_heads, q_len, kv_len]
      for (int64_t i = 0; i < num_heads * shape.q_len * shape.kv_len; ++i)
        floats.push_back(uniform() < 0.3 ? -infinity<float>()
                         : lowest(i)     ? -3.4028235e38f
                                         : static_cast<float>(uniform()));
      p.mask = floats.data();
      p.mask_dtype = DType::kFloat32;
      p.mask_strides = {0, shape.q_len * shape.kv_len, shape.kv_len, 1};
    }
    if (on.dropout) {
      set_dropout(p, 0.3, 1234567);
    }
    use_gradients(bp, grad_out, grad_query, grad_key, grad_value);
  }

  bool lowest(int64_t index) const {  // in the float mask
    const int64_t row = index / shape.kv_len, key = index % shape.kv_len;
    return (on.lowest && 3 * key < 2 * shape.kv_len) || (on.lowest_rows && row % 3 == 0);
  }

  int64_t kv_head_of(int64_t head) const {
    if (!p.group_start) return head / shape.group;
    for (int64_t kv = 0; kv < shape.num_kv_heads; ++kv)
      for (int64_t i = groups.start[kv]; i < groups.start[kv + 1]; ++i)
        if (groups.heads[i] == head) return kv;
    return -1;
  }

  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t position = i + (on.offsets ? offsets[b] : p.q_offset);
    return j < (on.lens ? lens[b] : shape.kv_len) && (!on.causal || j <= position) &&
           (p.window_left < 0 || j >= position - p.window_left) && (!on.window || j <= position + p.window_right) &&
           (!on.bool_mask || bools[b * p.mask_strides.batch + h * p.mask_strides.head + i * p.mask_strides.row + j]) &&
           (!on.float_mask || floats[(h * shape.q_len + i) * shape.kv_len + j] != -infinity<float>());
  }

  // NaN and Inf in a third of the keys that some row does not see.
  void poison() {
    S nan, inf;
    narrow(std::numeric_limits<A>::quiet_NaN(), &nan);
    narrow(infinity<A>(), &inf);
    for (int64_t b = 0; b < shape.batch; ++b)
      for (int64_t kv = 0; kv < shape.num_kv_heads; ++kv)
        for (int64_t j = 0; j < shape.kv_len; ++j) {
          bool hidden = false;
          for (int64_t h = 0; h < num_heads; ++h)
            for (int64_t i = 0; i < shape.q_len && kv_head_of(h) == kv; ++i) hidden |= !sees(b, h, i, j);
          if (hidden && j % 3 == 0) {
            key.at(b, kv, j, j % shape.head_dim) = nan;
            value.at(b, kv, j, j % shape.v_head_dim) = j % 2 ? inf : nan;
          }
        }
  }

  double q(int64_t b, int64_t h, int64_t i, int64_t d) { return widened(query.at(b, h, i, d)); }
  double k(int64_t b, int64_t h, int64_t j, int64_t d) { return widened(key.at(b, h, j, d)); }
  double v(int64_t b, int64_t h, int64_t j, int64_t d) {
    return widened(on.latent ? key.at(b, h, j, d) : value.at(b, h, j, d));
  }

  // One row by the formula: probabilities (before dropout), d(capped) / d(scaled), factors of dropout, lse, out, and
  // the sum of |probability * value|, which is the unit of rounding errors.
  struct Truth {
    std::vector<double> probs, slope, kept, out, size;
    double lse;
  };
  Truth row(int64_t b, int64_t h, int64_t i) {
    const int64_t kv = kv_head_of(h);
    Truth t{std::vector<double>(shape.kv_len),     std::vector<double>(shape.kv_len, 1),
            std::vector<double>(shape.kv_len, 1),  std::vector<double>(shape.v_head_dim),
            std::vector<double>(shape.v_head_dim), -kInf};
    std::vector<double> score(shape.kv_len, -kInf);
    double top = on.sinks ? sinks[h] : -kInf;
    for (int64_t j = 0; j < shape.kv_len; ++j) {
      if (!sees(b, h, i, j)) continue;
      double s = 0;
      for (int64_t d = 0; d < shape.head_dim; ++d) s += q(b, h, i, d) * k(b, kv, j, d);
      s *= p.scale;
      if (on.softcap) {
        t.slope[j] = 1 - std::pow(std::tanh(s / p.softcap), 2);
        s = p.softcap * std::tanh(s / p.softcap);
      }
      if (on.alibi) s -= slopes[h] * std::abs(static_cast<double>(i + (on.offsets ? offsets[b] : p.q_offset) - j));
      if (on.float_mask) s += floats[(h * shape.q_len + i) * shape.kv_len + j];
      score[j] = s;
      if (s > top) top = s;
    }
    double sum = on.sinks ? std::exp(sinks[h] - top) : 0;
    for (double s : score) sum += s == -kInf ? 0 : std::exp(s - top);
    if (sum != 0) t.lse = top + std::log(sum);
    for (int64_t j = 0; j < shape.kv_len; ++j) {
      if (score[j] == -kInf) continue;
      t.probs[j] = std::exp(score[j] - top) / sum;  // not by lse: there a mask's smallest number drowns the sum
      if (on.dropout) {
        uint64_t x =
            p.dropout_seed + 0x9e3779b97f4a7c15u * (((b * num_heads + h) * shape.q_len + i) * shape.kv_len + j + 1);
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        t.kept[j] = static_cast<double>(x >> 11) / 9007199254740992.0 < p.dropout_p ? 0 : 1 / (1 - p.dropout_p);
      }
      for (int64_t d = 0; d < shape.v_head_dim; ++d) {
        t.out[d] += t.probs[j] * t.kept[j] * v(b, kv, j, d);
        t.size[d] += std::abs(t.probs[j] * t.kept[j] * v(b, kv, j, d));
      }
    }
    return t;
  }
};

// The errors of results against the formula, in units of rounding errors. wrong: numbers that should be NaN or Inf, or
// should not.
template <class S>
struct ForwardErrors {
  double worst = 0, worst_lse = 0;
  int64_t wrong = 0;

  // out(d): the row's result in column d.
  template <class Out>
  void add(const typename Problem<S>::Truth& truth, double lse, const Out& out) {
    const double least = std::is_same_v<S, Float16> ? 0x1p-25 : 1e-38;  // rounding of the smallest results
    if (std::isfinite(truth.lse))
      worst_lse = std::max(worst_lse, std::abs(lse - truth.lse) / (1 + std::abs(truth.lse)));
    else
      wrong += std::isnan(truth.lse) ? !std::isnan(lse) : lse != truth.lse;
    for (size_t d = 0; d < truth.out.size(); ++d) {
      const double x = widened(out(d));
      if (!std::isfinite(truth.out[d]))
        wrong += std::isfinite(x);
      else if (!std::isfinite(x))
        ++wrong;
      else
        worst = std::max(worst, std::abs(x - truth.out[d]) / (unit<S>() * truth.size[d] + least));
    }
  }
};

constexpr Device kDevice{8, 227 * 1024};

// One kv head, unless a map chooses among them: the emulator takes a second for each.
inline int64_t kv_heads_of(const Settings& on) { return on.map ? 3 : 1; }

// How many problems a test draws: `usual`, or the number in ATTNPACK_DRAWS.
inline int drawn_problems(int usual) {
  const char* wanted = std::getenv("ATTNPACK_DRAWS");
  return wanted ? std::atoi(wanted) : usual;
}

inline int64_t draw(std::mt19937& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

inline Settings draw_settings(std::mt19937& random) {
  Settings on;
  for (bool* each : {&on.causal, &on.window, &on.past, &on.lens, &on.offsets, &on.softcap, &on.sinks, &on.alibi,
                     &on.bool_mask, &on.map, &on.dropout, &on.poison})
    *each = draw(random, 0, 3) == 0;
  on.float_mask = !on.bool_mask && draw(random, 0, 3) == 0;
  on.latent = draw(random, 0, 9) == 0;
  on.mask_heads = draw(random, 0, 1);
  on.mask_rows = draw(random, 0, 1);
  on.mask_blocks = draw(random, 0, 1);
  return on;
}

// Shapes are mostly small, so that they test edges: of tiles, of steps through the keys, of parts.
inline Shape draw_shape(std::mt19937& random, const Settings& on) {
  const int64_t widths[] = {1, 8, 20, 64, 104, 128, 200, 256};
  Shape shape{1,
              draw(random, 1, 3),
              draw(random, 1, 5),
              draw(random, 0, 1) ? draw(random, 1, 4) : draw(random, 1, 40),
              draw(random, 0, 1) ? draw(random, 1, 140) : draw(random, 1, 700),
              widths[draw(random, 0, 7)],
              widths[draw(random, 0, 7)]};
  if (on.latent) {
    shape.num_kv_heads = 1;
    shape.head_dim = 576;
    shape.v_head_dim = 512;
  }
  return shape;
}

}  // namespace attnpack::cuda
