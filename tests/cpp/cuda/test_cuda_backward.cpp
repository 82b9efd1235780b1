#include <memory>

#include "catch.h"
#include "cuda_gradients.h"
#include "cuda_run.h"

#include <attnpack/ops/cuda/kernels/linear.cuh>
#include <attnpack/ops/cuda/kernels/place.cuh>

// The source of the CUDA backward kernels and of the layers' kernels, run on an emulated block, against the formulas.
using namespace attnpack;
using namespace attnpack::cuda;

namespace {

enum class On { kExact, kTensorCores, kSm90 };

// On a device of so many multiprocessors, which decide into how many parts sums are cut.
template <class S>
void run(Problem<S>& x, int seed, On on, int64_t multiprocessors = kDevice.multiprocessors) {
  Device device = kDevice;
  device.sm90 = on == On::kSm90;
  device.multiprocessors = multiprocessors;
  const BackwardPlan plan = plan_backward(x.bp, x.most_group, device);
  if (multiprocessors > kDevice.multiprocessors) CHECK(std::max(plan.of_rows.parts, plan.of_keys.parts) > 1);
  CHECK((plan.width > 0) == (on != On::kExact));
  CHECK(plan.sm90 == (on == On::kSm90));
  run_backward_guarded<S>(x.bp, plan, seed);
}

// The kernels of sm_90 give no gradients of scores.
template <class S>
void prepare(Problem<S>& x, On on) {
  x.delta.assign(x.lse.size(), 0);
  if (on != On::kSm90) x.grad_scores.assign(x.lse.size() * x.shape.kv_len, 0);
  if (on != On::kSm90) x.bp.grad_scores = x.grad_scores.data();
  x.bp.delta = x.delta.data();
}

template <class S>
void check(const Shape& shape, const Settings& on, int seed, On kernel = On::kExact,
           int64_t multiprocessors = kDevice.multiprocessors) {
  CAPTURE(seed);
  Problem<S> x(shape, on, seed);
  prepare(x, kernel);
  const Gradients<S> truth(x);
  run(x, seed, kernel, multiprocessors);
  compare(x.grad_query, truth.query, shape.batch);
  compare(x.grad_key, truth.key, shape.batch);
  compare(x.grad_value, truth.value, shape.batch);
  double worst = 0;
  for (size_t i = 0; i < x.grad_scores.size(); ++i)
    if (std::isfinite(truth.scores[i].value))
      worst = std::max(worst, std::abs(truth.scores[i].value - x.grad_scores[i]) / (truth.scores[i].size + 1e-30));
  CHECK(worst < 100 * (sizeof(S) == 8 ? 0x1p-53 : 0x1p-24));
}

// No bit changes with the contents of keys that a row may not see, nor, with poisoned rows, with the contents of rows
// that may not see a key.
template <class S>
void check_bits(const Shape& shape, Settings on, int seed, bool poisoned_rows = false, On kernel = On::kTensorCores,
                int64_t multiprocessors = kDevice.multiprocessors) {
  Problem<S> clean(shape, on, seed);
  on.poison = !poisoned_rows;
  Problem<S> poisoned(shape, on, seed);
  if (poisoned_rows) {
    const int64_t last_head = poisoned.num_heads - 1, first = std::max<int64_t>(0, -poisoned.p.q_offset);  // sees a key
    narrow(std::numeric_limits<float>::quiet_NaN(), &poisoned.query.at(0, 0, first, 3));
    narrow(infinity<float>(), &poisoned.grad_out.at(0, 0, first + 1, 2));
    narrow(std::numeric_limits<float>::quiet_NaN(), &poisoned.query.at(0, last_head, first + 2, 5));
    // The weights of such a row are finite, so only the walk over NaN and Inf brings it to the values. A mask leaves
    // keys that the last row does not see.
    const int64_t row = on.bool_mask ? shape.q_len - 1 : first + 5;
    narrow(infinity<float>(), &poisoned.grad_out.at(0, last_head, row, 4));
  }
  prepare(clean, kernel);
  prepare(poisoned, kernel);
  const Gradients<S> of_clean(clean), truth(poisoned);
  run(clean, seed, kernel, multiprocessors);
  run(poisoned, seed + 1, kernel, multiprocessors);
  const auto same = [&](Tensor4<S>& a, Tensor4<S>& b, const Matrix& wanted) {
    int64_t finite = 0, wrong = 0, n = 0;
    for (int64_t i = 0; i < shape.batch; ++i)
      for (int64_t h = 0; h < a.heads; ++h)
        for (int64_t l = 0; l < a.length; ++l)
          for (int64_t d = 0; d < a.width; ++d, ++n)
            if (std::isfinite(wanted[n].value)) {
              ++finite;
              wrong += a.at(i, h, l, d).bits != b.at(i, h, l, d).bits;
            }
    CHECK(finite > 0);
    CHECK(wrong == 0);
  };
  same(clean.grad_query, poisoned.grad_query, truth.query);
  same(clean.grad_key, poisoned.grad_key, truth.key);
  same(clean.grad_value, poisoned.grad_value, truth.value);
  compare(poisoned.grad_query, truth.query, shape.batch);
  compare(poisoned.grad_key, truth.key, shape.batch);
  compare(poisoned.grad_value, truth.value, shape.batch);
}

std::vector<Settings> grid() {
  return {{},
          {.causal = true},
          {.window = true, .offsets = true},
          {.lens = true, .poison = true},
          {.softcap = true, .alibi = true},
          {.sinks = true, .bool_mask = true},
          {.causal = true, .float_mask = true, .poison = true},
          {.map = true},
          {.past = true},
          {.float_mask = true, .lowest = true},
          {.causal = true, .dropout = true}};
}

}  // namespace

TEST_CASE("exact backward") {
  int seed = 400;
  const Shape shape{2, 2, 3, 7, 50, 20, 33};
  for (const Settings& on : grid()) {
    check<float>(shape, on, ++seed);
    check<double>({1, 3, 1, 19, 40, 40, 5}, on, ++seed);
  }
  check<float>({1, 2, 2, 5, 100, 0, 9}, {.alibi = true, .float_mask = true}, ++seed);
  check<BFloat16>({1, 1, 2, 20, 40, 60, 64}, {.causal = true}, ++seed);
  check<Float16>({1, 2, 1, 20, 40, 264, 8}, {.causal = true}, ++seed);
}

TEST_CASE("backward on tensor cores") {
  int seed = 450;
  for (const Settings& on : grid())
    check<BFloat16>({2, kv_heads_of(on), 2, 33, 100, 64, 40}, on, ++seed, On::kTensorCores);
  for (const Settings& on : {grid()[1], grid()[6]})
    check<Float16>({1, 2, 2, 40, 100, 104, 128}, on, ++seed, On::kTensorCores);
  check<BFloat16>({1, 1, 1, 130, 130, 64, 64}, {.window = true}, ++seed, On::kTensorCores);
  check<BFloat16>({1, 1, 1, 65, 100, 192, 128}, {.causal = true}, ++seed, On::kTensorCores);
  check<Float16>({1, 1, 3, 30, 90, 8, 256}, {.sinks = true, .float_mask = true}, ++seed, On::kTensorCores);
}

TEST_CASE("the numbers of excluded pairs change no bit of a gradient on tensor cores") {
  check_bits<BFloat16>({2, 1, 2, 41, 150, 64, 64}, {.lens = true}, 551);
  check_bits<Float16>({1, 1, 2, 41, 150, 128, 64}, {.bool_mask = true}, 552);
  check_bits<BFloat16>({1, 2, 1, 70, 70, 64, 64}, {.causal = true}, 553, true);
  check_bits<Float16>({1, 1, 1, 70, 130, 192, 128}, {.window = true}, 554, true);
}

TEST_CASE("backward on sm_90") {
  int seed = 600;
  for (const Settings& on : {grid()[0], grid()[1], grid()[2], grid()[3], grid()[7], grid()[8]})
    check<BFloat16>({2, kv_heads_of(on), 2, 70, 150, 64, 40}, on, ++seed, On::kSm90);
  check<Float16>({1, 1, 2, 140, 150, 104, 128}, {.causal = true, .sinks = true}, ++seed, On::kSm90);
  check<BFloat16>({1, 1, 1, 130, 130, 64, 64}, {.causal = true, .poison = true}, ++seed, On::kSm90);
  const Device hopper{1, 227 * 1024, true};
  for (const Shape& empty : {Shape{0, 1, 1, 70, 70, 64, 64}, {1, 1, 1, 0, 70, 64, 64}, {1, 1, 1, 70, 0, 64, 64}}) {
    Problem<BFloat16> x(empty, {}, ++seed);
    CHECK(!plan_backward(x.bp, x.most_group, hopper).sm90);  // no map has a size of 0
  }
  check_bits<BFloat16>({2, 1, 2, 70, 150, 64, 64}, {.lens = true}, ++seed, false, On::kSm90);
  check_bits<Float16>({1, 1, 1, 70, 130, 128, 64}, {.window = true}, ++seed, true, On::kSm90);
  check_bits<BFloat16>({1, 2, 1, 70, 70, 64, 64}, {.causal = true}, ++seed, true, On::kSm90);
}

TEST_CASE("backward of wide queries on sm_90") {
  int seed = 615;
  check<BFloat16>({1, 2, 2, 70, 150, 192, 128}, {.causal = true, .sinks = true}, ++seed, On::kSm90);
  check<Float16>({2, 1, 1, 140, 90, 136, 40}, {.lens = true, .poison = true}, ++seed, On::kSm90);
  check<BFloat16>({1, 3, 2, 40, 140, 192, 128}, {.window = true, .offsets = true, .map = true}, ++seed, On::kSm90);
  check<BFloat16>({1, 1, 2, 70, 290, 192, 128}, {.bool_mask = true, .mask_rows = true, .mask_blocks = true}, ++seed,
                  On::kSm90);
  check<Float16>({1, 1, 3, 140, 70, 192, 128}, {.causal = true, .bool_mask = true, .poison = true}, ++seed, On::kSm90,
                 132);  // in parts
  check_bits<BFloat16>({1, 1, 1, 40, 150, 192, 128}, {.lens = true}, ++seed, false, On::kSm90);
  check_bits<BFloat16>({1, 1, 1, 70, 130, 192, 128}, {.causal = true}, ++seed, true, On::kSm90);
}

TEST_CASE("backward under rules on sm_90") {
  constexpr int64_t kMany = 132;
  int seed = 690;
  for (const Settings& on : {grid()[4], grid()[6], grid()[9], grid()[10]})
    check<BFloat16>({2, kv_heads_of(on), 2, 70, 150, 64, 40}, on, ++seed, On::kSm90);
  check<BFloat16>({2, kv_heads_of(kManyRules), 2, 70, 150, 64, 64}, kManyRules, ++seed, On::kSm90);
  check<Float16>({1, 1, 2, 140, 150, 104, 128}, {.softcap = true, .dropout = true}, ++seed, On::kSm90);
  check<Float16>(
      {2, 2, 1, 70, 200, 64, 64},
      {.window = true, .offsets = true, .alibi = true, .bool_mask = true, .dropout = true, .mask_rows = true}, ++seed,
      On::kSm90);
  check<BFloat16>({1, 1, 3, 270, 70, 64, 40}, {.softcap = true, .alibi = true}, ++seed, On::kSm90, kMany);
  check_bits<BFloat16>({2, 1, 2, 70, 150, 64, 64}, {.lens = true, .softcap = true}, ++seed, false, On::kSm90);
  check_bits<Float16>({1, 1, 1, 70, 130, 64, 64}, {.causal = true, .softcap = true}, ++seed, true, On::kSm90);
}

TEST_CASE("backward under a bool mask on sm_90") {
  constexpr int64_t kMany = 132;
  const Settings mask{.bool_mask = true, .mask_rows = true}, blocks{.bool_mask = true, .mask_blocks = true};
  const auto with = [](Settings on, const auto& change) {
    change(on);
    return on;
  };
  int seed = 630;
  check<BFloat16>({2, 2, 2, 70, 150, 64, 40}, with(mask, [](auto& on) { on.causal = on.poison = true; }), ++seed,
                  On::kSm90);
  check<BFloat16>({2, 1, 3, 70, 400, 64, 64}, blocks, ++seed, On::kSm90);
  check<Float16>({1, 2, 2, 140, 290, 104, 128},
                 with(blocks, [](auto& on) { on.mask_rows = on.mask_heads = on.sinks = on.poison = true; }), ++seed,
                 On::kSm90);
  check<BFloat16>({2, 2, 2, 70, 300, 64, 64},
                  with(blocks, [](auto& on) { on.mask_rows = on.lens = on.offsets = on.window = true; }), ++seed,
                  On::kSm90);
  check<BFloat16>({1, 3, 2, 80, 200, 64, 64},
                  with(mask, [](auto& on) { on.map = on.mask_heads = on.past = on.poison = true; }), ++seed, On::kSm90);
  check<Float16>({2, 3, 2, 80, 300, 64, 64}, with(blocks, [](auto& on) { on.map = on.lens = true; }), ++seed,
                 On::kSm90);
  // In parts: of the rows' steps, and of the keys'.
  check<BFloat16>({2, 1, 3, 270, 300, 64, 40}, with(blocks, [](auto& on) { on.mask_rows = on.poison = true; }), ++seed,
                  On::kSm90, kMany);
  check<Float16>({2, 1, 2, 30, 770, 64, 64}, with(blocks, [](auto& on) { on.lens = on.poison = true; }), ++seed,
                 On::kSm90, kMany);
  check_bits<BFloat16>({2, 1, 2, 70, 290, 64, 64}, blocks, ++seed, false, On::kSm90);
  check_bits<Float16>({1, 1, 2, 70, 130, 128, 64}, mask, ++seed, true, On::kSm90);
  // The last keys are in the list of the last rows' step, the third one.
  check_bits<Float16>({1, 1, 1, 140, 260, 64, 64}, with(mask, [](auto& on) { on.causal = true; }), ++seed, true,
                      On::kSm90);
  check_bits<BFloat16>({1, 2, 1, 70, 290, 64, 64}, with(blocks, [](auto& on) { on.causal = true; }), ++seed, true,
                       On::kSm90);
}

TEST_CASE("gradients whose sums are cut into parts") {
  constexpr int64_t kMany = 132;
  int seed = 670;
  // Three parts of the rows, which begin and end between the query heads' steps; then three parts of the keys.
  for (const On kernel : {On::kTensorCores, On::kSm90}) {
    for (const Settings& on : {grid()[0], grid()[1], grid()[7]})
      check<BFloat16>({1, kv_heads_of(on), 3, 270, 70, 64, 40}, on, ++seed, kernel, kMany);
    for (const Settings& on : {grid()[2], grid()[3]})
      check<Float16>({2, kv_heads_of(on), 2, 30, 770, 64, 64}, on, ++seed, kernel, kMany);
    check_bits<BFloat16>({1, 1, 1, 40, 530, 64, 64}, {.lens = true}, ++seed, false, kernel, kMany);
    check_bits<Float16>({1, 1, 2, 270, 70, 64, 40}, {.causal = true}, ++seed, true, kernel, kMany);
  }
  check<BFloat16>({1, 1, 1, 20, 300, 192, 128}, {.causal = true, .poison = true}, ++seed, On::kTensorCores, kMany);
  check<BFloat16>({1, 1, 2, 140, 530, 64, 64}, {.softcap = true, .float_mask = true}, ++seed, On::kTensorCores, kMany);
}

// lse may come from another kernel's forward pass, and the roundings of huge scores differ by more than 1.
template <class S>
void check_huge(const Shape& shape, int seed, On kernel) {
  Problem<S> x(shape, {}, seed);
  prepare(x, kernel);
  x.p.scale = 3e7;
  const Gradients<S> truth(x);
  int64_t wrong = 0, huge = 0;
  for (auto& lse : x.lse) {
    huge += std::abs(lse) > 1e8;
    lse -= 30;
  }
  run(x, seed, kernel);
  for (int64_t h = 0; h < shape.num_kv_heads; ++h)
    for (int64_t d = 0; d < shape.v_head_dim; ++d)
      for (int64_t j = 0; j < shape.kv_len; ++j) {
        double most = 0;  // the sum of the rows' sizes: no probability is above 1
        for (int64_t i = 0; i < shape.q_len; ++i) most += std::abs(widen(x.grad_out.at(0, h, i, d)));
        wrong += !(std::abs(widen(x.grad_value.at(0, h, j, d))) <= 1.01 * most);
      }
  for (int64_t i = 0; i < shape.q_len; ++i)
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      double most = 0;  // of |scale P (dP - delta) k|, with P = 1
      for (int64_t j = 0; j < shape.kv_len; ++j) {
        double product = std::abs(x.delta[i]);
        for (int64_t c = 0; c < shape.v_head_dim; ++c)
          product += std::abs(widen(x.grad_out.at(0, 0, i, c)) * widen(x.value.at(0, 0, j, c)));
        most += product * std::abs(widen(x.key.at(0, 0, j, d))) * x.p.scale;
      }
      wrong += !(std::abs(widen(x.grad_query.at(0, 0, i, d))) <= 1.01 * most);
    }
  CHECK(huge > 0);
  CHECK(wrong == 0);
}

TEST_CASE("no probability of huge scores is above 1 in a gradient") {
  check_huge<float>({1, 1, 1, 9, 20, 20, 12}, 651, On::kExact);
  check_huge<BFloat16>({1, 1, 1, 20, 40, 64, 64}, 652, On::kTensorCores);
  check_huge<BFloat16>({1, 1, 1, 20, 40, 64, 64}, 653, On::kSm90);
}

TEST_CASE("backward of drawn problems") {
  for (int seed = 700; seed < 700 + drawn_problems(8); ++seed) {
    std::mt19937 random(seed);
    Settings on = draw_settings(random);
    on.latent = false;
    Shape shape = draw_shape(random, on);
    shape.kv_len = (shape.kv_len + 3) / 4;
    const bool whole_chunks = shape.head_dim % 8 == 0 && shape.v_head_dim % 8 == 0;
    const bool rules = on.softcap || on.alibi || on.float_mask || on.dropout;
    const int64_t width = backward_width_sm90(shape.head_dim, shape.v_head_dim);
    const bool fits_sm90 = rules ? width == 64 || width == 128 : width > 0;
    const On kernel = !whole_chunks ? On::kExact : fits_sm90 && draw(random, 0, 3) > 0 ? On::kSm90 : On::kTensorCores;
    switch (draw(random, 0, 3)) {
      case 0:
        check<float>(shape, on, seed);
        break;
      case 1:
        check<double>(shape, on, seed);
        break;
      case 2:
        check<BFloat16>(shape, on, seed, kernel);
        break;
      default:
        check<Float16>(shape, on, seed, kernel);
    }
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

// base: the start of the arrays, in numbers after a 16-byte boundary.
template <class S>
void check_linear(int64_t rows, int64_t inputs, int64_t stride, int64_t base) {
  const int64_t outputs = 9;
  CAPTURE(rows, inputs, stride, base);
  const auto room = [](int64_t count) { return Guarded((count * sizeof(S) + 15) / 16 * 16); };
  Guarded x_room = room(base + rows * inputs), weight_room = room(base + outputs * stride);
  S *x = static_cast<S*>(x_room.data()) + base, *weight = static_cast<S*>(weight_room.data()) + base;
  std::vector<S> bias(outputs), out(rows * outputs);
  for (int64_t i = 0; i < rows * inputs; ++i) narrow(std::sin(0.7f * static_cast<float>(i)), x + i);
  for (int64_t i = 0; i < outputs * stride; ++i) narrow(std::cos(0.3f * static_cast<float>(i)), weight + i);
  for (int64_t i = 0; i < outputs; ++i) narrow(static_cast<float>(i), &bias[i]);
  const LinearParams p{rows, inputs, outputs, dtype_of<S>(), x, weight, stride, bias.data(), out.data()};
  EmulatedBlock block(kLinearThreads, 3);
  for (int64_t i = 0; i < (outputs + 3) / 4; ++i) block.run([&] { linear_block<S>(p, i); });
  double worst = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < outputs; ++o) {
      Sum sum;
      sum.add(widen(bias[o]), widen(bias[o]));
      for (int64_t i = 0; i < inputs; ++i) {
        const double term = static_cast<double>(widen(x[r * inputs + i])) * widen(weight[o * stride + i]);
        sum.add(term, term);
      }
      worst = std::max(worst, std::abs(widen(out[r * outputs + o]) - sum.value) / sum.size);
    }
  CHECK(worst < (sizeof(S) == 2 ? 2 : 10) * unit<S>());
}

TEST_CASE("few-row linear") {
  check_linear<float>(5, 70, 75, 0);
  check_linear<float>(4, 72, 76, 0);  // by 16 bytes
  check_linear<float>(3, 300, 300, 0);
  check_linear<float>(1, 72, 72, 1);
  check_linear<BFloat16>(5, 520, 520, 0);
  check_linear<BFloat16>(2, 520, 524, 0);
  check_linear<Float16>(16, 64, 72, 0);
  check_linear<Float16>(1, 7, 8, 3);
}
