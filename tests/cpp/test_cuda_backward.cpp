#include <memory>

#include "catch.h"
#include "cuda_emulator.h"
#include "cuda_problem.h"

#include <attnpack/ops/cuda/append.cuh>
#include <attnpack/ops/cuda/backward_exact.cuh>
#include <attnpack/ops/cuda/linear.cuh>
#include <attnpack/ops/cuda/rope.cuh>

// The CUDA backward kernels and those of a layer, their very source, on an emulated block, against the formulas.
using namespace attnpack;
using namespace attnpack::cuda;

namespace {

using Matrix = std::vector<double>;

// Gradients by the formula, in fp64; nan_key marks what an allowed NaN makes of a row.
template <class S>
struct Gradients {
  Matrix query, key, value, scores;
  explicit Gradients(Problem<S>& x) {
    const Shape& s = x.shape;
    query.assign(s.batch * x.num_heads * s.q_len * s.head_dim, 0);
    key.assign(s.batch * s.num_kv_heads * s.kv_len * s.head_dim, 0);
    value.assign(s.batch * s.num_kv_heads * s.kv_len * s.v_head_dim, 0);
    scores.assign(s.batch * x.num_heads * s.q_len * s.kv_len, 0);
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < x.num_heads; ++h)
        for (int64_t i = 0; i < s.q_len; ++i) add_row(x, b, h, i);
  }

  void add_row(Problem<S>& x, int64_t b, int64_t h, int64_t i) {
    const Shape& s = x.shape;
    const int64_t kv = x.kv_head_of(h), row = (b * x.num_heads + h) * s.q_len + i, head = b * s.num_kv_heads + kv;
    const auto truth = x.row(b, h, i);
    double delta = 0;
    for (int64_t d = 0; d < s.v_head_dim; ++d) delta += widen(x.grad_out.at(b, h, i, d)) * truth.out[d];
    x.lse[row] = static_cast<typename Problem<S>::A>(truth.lse);
    x.delta[row] = static_cast<typename Problem<S>::A>(delta);
    for (int64_t j = 0; j < s.kv_len; ++j) {
      if (!x.sees(b, h, i, j)) continue;
      double grad = 0;
      for (int64_t d = 0; d < s.v_head_dim; ++d) grad += widen(x.grad_out.at(b, h, i, d)) * x.v(b, kv, j, d);
      const double ds = truth.probs[j] * (truth.kept[j] * grad - delta);
      scores[row * s.kv_len + j] = ds;
      for (int64_t d = 0; d < s.head_dim; ++d) {
        query[row * s.head_dim + d] += ds * truth.slope[j] * x.p.scale * x.k(b, kv, j, d);
        key[(head * s.kv_len + j) * s.head_dim + d] += ds * truth.slope[j] * x.p.scale * x.q(b, h, i, d);
      }
      for (int64_t d = 0; d < s.v_head_dim; ++d)
        value[(head * s.kv_len + j) * s.v_head_dim + d] +=
            truth.probs[j] * truth.kept[j] * widen(x.grad_out.at(b, h, i, d));
    }
  }
};

template <Gradient Of, class S>
void run(Problem<S>& x, int seed) {
  using A = typename Problem<S>::A;
  EmulatedBlock block(kBackwardThreads, seed);
  for (int64_t i = 0; i < backward_blocks(x.p, Of, x.most_group); ++i) {
    ExactShared<A> shared;
    block.fill_garbage(&shared, sizeof shared);
    block.run([&] { backward_block<Of, S, A>(x.bp, x.most_group, i, &shared); });
  }
}

template <class S>
void compare(Tensor4<S>& got, const Matrix& wanted, int64_t batch, double tolerance) {
  double worst = 0;
  int64_t wrong = 0, n = 0;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < got.heads; ++h)
      for (int64_t l = 0; l < got.length; ++l)
        for (int64_t d = 0; d < got.width; ++d, ++n) {
          const double x = widen(got.at(b, h, l, d));
          if (std::isfinite(wanted[n]) != std::isfinite(x))
            ++wrong;
          else if (std::isfinite(x))
            worst = std::max(worst, std::abs(x - wanted[n]) / (1 + std::abs(wanted[n])));
        }
  CHECK(wrong == 0);
  CHECK(worst < tolerance);
}

template <class S>
void check(const Shape& shape, const Settings& on, int seed, double tolerance) {
  CAPTURE(seed);
  Problem<S> x(shape, on, seed);
  x.delta.assign(x.lse.size(), 0);
  x.grad_scores.assign(shape.batch * x.num_heads * shape.q_len * shape.kv_len, 0);
  x.bp.grad_scores = x.grad_scores.data();
  const Gradients<S> truth(x);
  x.bp.delta = x.delta.data();
  run<Gradient::kQuery>(x, seed);
  run<Gradient::kKey>(x, seed);
  run<Gradient::kValue>(x, seed);
  compare(x.grad_query, truth.query, shape.batch, tolerance);
  compare(x.grad_key, truth.key, shape.batch, tolerance);
  compare(x.grad_value, truth.value, shape.batch, tolerance);
  double worst = 0;
  for (size_t i = 0; i < truth.scores.size(); ++i)
    if (std::isfinite(truth.scores[i]))
      worst = std::max(worst, std::abs(truth.scores[i] - x.grad_scores[i]) / (1 + std::abs(truth.scores[i])));
  CHECK(worst < tolerance);
}

}  // namespace

TEST_CASE("backward") {
  int seed = 400;
  const Shape shape{2, 2, 3, 7, 50, 20, 33};
  for (const Settings& on : std::vector<Settings>{{},
                                                  {.causal = true},
                                                  {.window = true, .offsets = true},
                                                  {.lens = true, .poison = true},
                                                  {.softcap = true, .alibi = true},
                                                  {.sinks = true, .bool_mask = true},
                                                  {.causal = true, .float_mask = true, .poison = true},
                                                  {.map = true},
                                                  {.past = true},
                                                  {.causal = true, .dropout = true}}) {
    check<float>(shape, on, ++seed, 1e-5);
    check<double>({1, 3, 1, 19, 40, 40, 5}, on, ++seed, 1e-13);
  }
  check<float>({1, 2, 2, 5, 100, 0, 9}, {.alibi = true, .float_mask = true}, ++seed, 1e-5);
  check<BFloat16>({1, 1, 2, 20, 40, 64, 64}, {.causal = true}, ++seed, 0x1p-8);
  check<Float16>({1, 2, 1, 20, 40, 140, 8}, {.causal = true}, ++seed, 0x1p-10);
}

TEST_CASE("backward of drawn problems") {
  for (int seed = 700; seed < 700 + drawn_problems(8); ++seed) {
    std::mt19937 random(seed);
    Settings on = draw_settings(random);
    on.latent = false;
    Shape shape = draw_shape(random, on);
    shape.kv_len = (shape.kv_len + 3) / 4;
    draw(random, 0, 1) ? check<float>(shape, on, seed, 1e-4) : check<double>(shape, on, seed, 1e-12);
  }
}

TEST_CASE("append writes behind each sequence's end and nowhere else") {
  const int64_t batch = 3, heads = 2, fresh = 4, capacity = 9, width = 6;
  std::vector<float> cache(batch * heads * capacity * width, -1), x(batch * heads * fresh * width);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  const std::vector<int64_t> lengths{0, 7, 3}, lens{4, 4, 2};
  AppendParams p{batch,
                 heads,
                 fresh,
                 capacity,
                 width * 4,
                 x.data(),
                 cache.data(),
                 {heads * fresh * width * 4, fresh * width * 4, width * 4, 4},
                 {heads * capacity * width * 4, capacity * width * 4, width * 4, 4},
                 lengths.data(),
                 1,
                 lens.data()};
  EmulatedBlock block(kAppendThreads, 1);
  for (int64_t i = 0; i < batch * heads * fresh; ++i) block.run([&] { append_block(p, i); });
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t j = 0; j < capacity; ++j)
        for (int64_t d = 0; d < width; ++d) {
          const int64_t i = j - lengths[b];
          const float wanted = i >= 0 && i < lens[b] ? x[((b * heads + h) * fresh + i) * width + d] : -1;
          CHECK(cache[((b * heads + h) * capacity + j) * width + d] == wanted);
        }
}

TEST_CASE("rope turns pairs and leaves the rest") {
  for (bool interleaved : {false, true}) {
    const int64_t heads = 2, length = 3, dim = 10, half = 4;
    std::vector<float> x(heads * length * dim), out(x.size(), -9), cos(length * half), sin(length * half);
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.7f * static_cast<float>(i));
    for (size_t i = 0; i < cos.size(); ++i) {
      cos[i] = std::cos(0.3f * static_cast<float>(i));
      sin[i] = std::sin(0.3f * static_cast<float>(i));
    }
    const Strides of_x{0, length * dim, dim, 1}, of_table{0, 0, half, 1};
    RopeParams p{1,          heads,      length,     dim,  half, DType::kFloat32, interleaved, false, x.data(),
                 cos.data(), sin.data(), out.data(), of_x, of_x, of_table,        of_table};
    EmulatedBlock block(kRopeThreads, 2);
    for (int64_t i = 0; i < heads * length; ++i) block.run([&] { rotate_row<float, float>(p, i); });
    for (int64_t r = 0; r < heads * length; ++r) {
      for (int64_t i = 0; i < half; ++i) {
        const int64_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
        const double angle = 0.3 * static_cast<double>(r % length * half + i);
        CHECK(std::abs(out[r * dim + a] - (x[r * dim + a] * std::cos(angle) - x[r * dim + b] * std::sin(angle))) <
              1e-6);
        CHECK(std::abs(out[r * dim + b] - (x[r * dim + b] * std::cos(angle) + x[r * dim + a] * std::sin(angle))) <
              1e-6);
      }
      for (int64_t d = 2 * half; d < dim; ++d) CHECK(out[r * dim + d] == x[r * dim + d]);
    }
  }
}

TEST_CASE("few-row linear") {
  const int64_t rows = 5, inputs = 70, outputs = 9, stride = 75;
  std::vector<float> x(rows * inputs), weight(outputs * stride), bias(outputs), out(rows * outputs, -9);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.7f * static_cast<float>(i));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = std::cos(0.3f * static_cast<float>(i));
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i);
  const LinearParams p{rows,          inputs, outputs,     DType::kFloat32, x.data(),
                       weight.data(), stride, bias.data(), out.data()};
  EmulatedBlock block(kLinearThreads, 3);
  for (int64_t i = 0; i < (outputs + 3) / 4; ++i) block.run([&] { linear_block<float>(p, i); });
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = bias[o];
      for (int64_t i = 0; i < inputs; ++i) sum += static_cast<double>(x[r * inputs + i]) * weight[o * stride + i];
      CHECK(std::abs(out[r * outputs + o] - sum) < 1e-5);
    }
}
