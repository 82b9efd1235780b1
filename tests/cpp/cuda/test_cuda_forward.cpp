#include <optional>

#include "catch.h"
#include "cuda_problem.h"
#include "cuda_run.h"

// The source of the CUDA forward kernels, run on an emulated block, against the formula in fp64.
using namespace attnpack;
using namespace attnpack::cuda;

namespace {

// No bit changes with the contents of keys that no row may see, nor with the contents of rows that may not see a key.
template <class S>
void check_bits(const Shape& shape, Settings on, int seed, const Device& device = kDevice) {
  on.poison = false;
  Problem<S> clean(shape, on, seed);
  on.poison = true;
  Problem<S> poisoned(shape, on, seed);
  const ForwardPlan plan = plan_forward(clean.p, clean.most_group, device);
  run_forward_guarded<S>(clean.p, plan, seed);
  run_forward_guarded<S>(poisoned.p, plan, seed + 1);
  int64_t same = 0, wrong = 0;
  for (int64_t b = 0; b < shape.batch; ++b)
    for (int64_t h = 0; h < clean.num_heads; ++h)
      for (int64_t i = 0; i < shape.q_len; ++i) {
        const auto truth = poisoned.row(b, h, i);
        for (int64_t d = 0; d < shape.v_head_dim; ++d)
          if (std::isfinite(truth.out[d])) {
            ++same;
            wrong += clean.out.at(b, h, i, d).bits != poisoned.out.at(b, h, i, d).bits;
          }
      }
  CHECK(same > 0);
  CHECK(wrong == 0);
}

// The largest error, in units of the rounding of the storage type.
template <class S>
void check(const Shape& shape, const Settings& on, std::optional<ForwardKernel> kernel, int seed,
           Device device = kDevice) {
  CAPTURE(shape.q_len, shape.kv_len, shape.head_dim, seed);
  Problem<S> problem(shape, on, seed);
  const ForwardPlan plan = plan_forward(problem.p, problem.most_group, device);
  if (kernel) CHECK(plan.kernel == *kernel);
  run_forward_guarded<S>(problem.p, plan, seed);
  ForwardErrors<S> errors;
  for (int64_t b = 0; b < shape.batch; ++b)
    for (int64_t h = 0; h < problem.num_heads; ++h)
      for (int64_t i = 0; i < shape.q_len; ++i) {
        const double lse = problem.lse[(b * problem.num_heads + h) * shape.q_len + i];
        errors.add(problem.row(b, h, i), lse, [&](int64_t d) { return problem.out.at(b, h, i, d); });
      }
  CHECK(errors.wrong == 0);
  // Weights and the result are rounded to the storage type, by up to two units each; few rows reach that. fp32 and fp64
  // also see the error of long sums.
  CHECK(errors.worst < (sizeof(S) == 4 || sizeof(S) == 8 ? 100 : kernel ? 2.5 : 4.5));
  CHECK(errors.worst_lse < (std::is_same_v<S, double> ? 1e-13 : 2e-6));
}

std::vector<Settings> grid() {
  return {{},
          {.causal = true},
          {.window = true, .offsets = true},
          {.lens = true, .poison = true},
          {.causal = true, .offsets = true, .sinks = true},
          {.softcap = true, .alibi = true},
          {.bool_mask = true, .poison = true},
          {.causal = true, .float_mask = true, .poison = true},
          {.map = true},
          {.causal = true, .dropout = true},
          {.causal = true, .poison = true},
          {.past = true},
          {.past = true, .softcap = true, .float_mask = true},
          kManyRules};
}

}  // namespace

TEST_CASE("exact forward") {
  int seed = 0;
  for (const Settings& on : grid()) {
    check<float>({2, 2, 3, 7, 50, 20, 33}, on, ForwardKernel::kExact, ++seed);
    check<double>({1, 3, 1, 19, 40, 40, 5}, on, ForwardKernel::kExact, ++seed);
  }
  check<float>({1, 1, 1, 1, 1500, 8, 140}, {.lens = true, .poison = true}, ForwardKernel::kExact, ++seed);
  check<float>({1, 2, 2, 5, 150, 0, 9}, {.alibi = true}, ForwardKernel::kExact, ++seed);
  check<BFloat16>({1, 2, 2, 5, 40, 17, 9}, {.causal = true}, ForwardKernel::kExact, ++seed);
  check<Float16>({1, 2, 2, 5, 40, 30, 300}, {.causal = true}, ForwardKernel::kExact, ++seed);
}

TEST_CASE("prefill on tensor cores") {
  int seed = 100;
  for (const Settings& on : grid())
    check<BFloat16>({2, kv_heads_of(on), 2, 41, 150, 64, 64}, on, ForwardKernel::kPrefill, ++seed, {1, 227 * 1024});
  for (const Settings& on : {grid()[1], grid()[10]})
    check<Float16>({1, 1, 2, 70, 130, 128, 104}, on, ForwardKernel::kPrefill, ++seed);
  check<BFloat16>({1, 1, 1, 65, 100, 192, 128}, {.causal = true}, ForwardKernel::kPrefill, ++seed);
  check<Float16>({1, 1, 1, 40, 700, 40, 24}, {.causal = true}, ForwardKernel::kPrefill, ++seed);  // in parts
}

TEST_CASE("prefill on sm_90") {
  const Device one{1, 227 * 1024, true}, eight{8, 227 * 1024, true};
  int seed = 100;
  for (const Settings& on : grid())
    check<BFloat16>({2, kv_heads_of(on), 2, 41, 150, 64, 64}, on, ForwardKernel::kSm90, ++seed, one);
  for (const Settings& on : {grid()[1], grid()[10]}) {
    check<Float16>({1, 1, 2, 70, 300, 128, 104}, on, ForwardKernel::kSm90, ++seed, one);
    check<BFloat16>({1, 1, 1, 130, 200, 192, 256}, on, ForwardKernel::kSm90, ++seed, one);
    check<BFloat16>({1, 1, 1, 130, 200, 192, 128}, on, ForwardKernel::kSm90, ++seed, one);
  }
  check<BFloat16>({1, 1, 1, 70, 300, 64, 128}, {.lens = true, .sinks = true}, ForwardKernel::kSm90, ++seed, one);
  check<Float16>({1, 1, 1, 40, 700, 40, 24}, {.causal = true}, ForwardKernel::kSm90, ++seed, eight);  // in parts
  check<Float16>({1, 1, 1, 40, 700, 40, 24}, {.causal = true, .poison = true}, ForwardKernel::kSm90, ++seed, eight);
  check<BFloat16>({1, 1, 1, 70, 0, 64, 64}, {}, ForwardKernel::kPrefill, ++seed, one);  // no map has a size of 0
  check<BFloat16>({0, 1, 1, 70, 40, 64, 64}, {}, ForwardKernel::kPrefill, ++seed, one);
  check_bits<BFloat16>({2, 1, 2, 70, 300, 64, 64}, {.lens = true}, ++seed, one);
  check_bits<Float16>({1, 1, 2, 70, 150, 128, 64}, {.causal = true}, ++seed, one);
}

TEST_CASE("prefill by three warpgroups on sm_90") {
  const Device one{1, 227 * 1024, true};
  int seed = 450;
  const auto check_three = [&](auto storage, const Shape& shape, const Settings& on) {
    using S = decltype(storage);
    Problem<S> problem(shape, on, ++seed);
    CHECK(plan_forward(problem.p, problem.most_group, one).tile_rows == kSm90MostTileRows);
    check<S>(shape, on, ForwardKernel::kSm90, seed, one);
  };
  check_three(BFloat16(), {2, 1, 2, 90, 400, 64, 64}, {});
  check_three(BFloat16(), {1, 1, 2, 150, 300, 64, 64}, {.causal = true, .sinks = true, .poison = true});
  check_three(Float16(), {1, 2, 3, 60, 150, 40, 24}, {.lens = true, .poison = true});
  check_three(Float16(), {1, 1, 1, 180, 100, 64, 64}, {.window = true, .offsets = true});
  check_three(BFloat16(), {1, 1, 1, 370, 290, 64, 64}, {.causal = true, .past = true});
  check_bits<BFloat16>({2, 1, 2, 90, 300, 64, 64}, {.lens = true}, ++seed, one);
  check_bits<Float16>({1, 1, 1, 180, 150, 64, 64}, {.causal = true}, ++seed, one);
}

TEST_CASE("prefill under a bool mask on sm_90") {
  const Device one{1, 227 * 1024, true}, eight{8, 227 * 1024, true};
  constexpr auto kKernel = ForwardKernel::kSm90;
  const Settings mask{.bool_mask = true}, blocks{.bool_mask = true, .poison = true, .mask_blocks = true};
  const auto with = [](Settings on, const auto& change) {
    change(on);
    return on;
  };
  int seed = 400;
  check<BFloat16>({2, 2, 2, 41, 150, 64, 64}, with(mask, [](auto& on) { on.mask_rows = on.lens = true; }), kKernel,
                  ++seed, one);
  check<BFloat16>({2, 1, 2, 70, 600, 64, 64}, blocks, kKernel, ++seed, one);
  check<BFloat16>({1, 2, 3, 50, 520, 64, 64}, with(blocks, [](auto& on) { on.mask_rows = on.causal = true; }), kKernel,
                  ++seed, one);
  check<Float16>({2, 1, 2, 70, 400, 128, 104}, with(blocks, [](auto& on) { on.mask_heads = on.sinks = true; }), kKernel,
                 ++seed, one);
  check<Float16>({1, 3, 2, 45, 300, 64, 128},
                 with(blocks, [](auto& on) { on.map = on.mask_heads = on.mask_rows = true; }), kKernel, ++seed, one);
  check<BFloat16>({2, 3, 2, 45, 300, 64, 64}, with(blocks, [](auto& on) { on.map = true; }), kKernel, ++seed, one);
  check<BFloat16>({1, 1, 1, 130, 420, 192, 256}, with(blocks, [](auto& on) { on.mask_rows = on.causal = true; }),
                  kKernel, ++seed, one);
  check<BFloat16>({1, 1, 1, 130, 420, 192, 128}, with(blocks, [](auto& on) { on.window = true; }), kKernel, ++seed,
                  one);
  check<Float16>({2, 1, 1, 40, 1300, 40, 24}, with(blocks, [](auto& on) { on.lens = on.offsets = true; }), kKernel,
                 ++seed, eight);  // in parts
  check<Float16>({2, 1, 1, 40, 1300, 40, 24}, with(blocks, [](auto& on) { on.mask_rows = on.past = true; }), kKernel,
                 ++seed, eight);
  check_bits<BFloat16>({2, 1, 2, 41, 350, 64, 64}, with(blocks, [](auto& on) { on.causal = true; }), ++seed, one);
  check_bits<Float16>({1, 2, 1, 41, 150, 128, 64}, with(mask, [](auto& on) { on.mask_heads = true; }), ++seed, one);
}

TEST_CASE("decode on tensor cores") {
  int seed = 200;
  for (const Settings& on : grid())
    check<BFloat16>({2, kv_heads_of(on), 2, 2, 700, 64, 64}, on, ForwardKernel::kDecode, ++seed);
  check<Float16>({1, 2, 5, 3, 300, 128, 128}, {.causal = true}, ForwardKernel::kDecode, ++seed);
  check<Float16>({1, 1, 16, 1, 1200, 256, 200}, {.lens = true, .poison = true}, ForwardKernel::kDecode, ++seed);
  check<Float16>({1, 1, 3, 2, 600, 256, 256}, {.past = true}, {}, ++seed);  // parts without keys; rows of two
}

TEST_CASE("latent decode reads keys and values once") {
  int seed = 300;
  const Settings causal{.causal = true, .latent = true};
  check<BFloat16>({1, 1, 16, 1, 100, 576, 512}, causal, ForwardKernel::kLatent, ++seed);
  check<Float16>({1, 1, 7, 2, 600, 576, 512}, {.causal = true, .lens = true, .latent = true}, ForwardKernel::kLatent,
                 ++seed);
  check<BFloat16>({1, 1, 40, 2, 70, 576, 512}, causal, ForwardKernel::kLatent, ++seed);
  check<BFloat16>({1, 1, 5, 2, 600, 576, 512}, {.past = true, .latent = true}, ForwardKernel::kLatent, ++seed);
  check<BFloat16>({1, 1, 20, 1, 40, 576, 512}, {.bool_mask = true, .dropout = true, .poison = true, .latent = true},
                  ForwardKernel::kLatent, ++seed);
}

TEST_CASE("latent decode on sm_90") {
  const Device one{1, 227 * 1024, true}, eight{8, 227 * 1024, true};
  constexpr auto kKernel = ForwardKernel::kLatentSm90;
  int seed = 350;
  check<BFloat16>({1, 1, 16, 1, 100, 576, 512}, {.causal = true, .latent = true}, kKernel, ++seed, one);
  check<Float16>({1, 1, 7, 2, 600, 576, 512}, {.causal = true, .lens = true, .latent = true}, kKernel, ++seed, eight);
  check<BFloat16>({1, 1, 40, 2, 70, 576, 512}, {.causal = true, .poison = true, .latent = true}, kKernel, ++seed, one);
  check<BFloat16>({1, 1, 5, 2, 600, 576, 512}, {.past = true, .latent = true}, kKernel, ++seed, eight);
  check<BFloat16>({1, 1, 20, 1, 40, 576, 512}, {.bool_mask = true, .latent = true}, ForwardKernel::kLatent, ++seed,
                  one);
  check_bits<BFloat16>({1, 1, 20, 1, 140, 576, 512}, {.lens = true, .latent = true}, ++seed, one);
  check_bits<BFloat16>({1, 1, 20, 4, 140, 576, 512}, {.causal = true, .latent = true}, ++seed, one);
}

TEST_CASE("what excluded keys hold changes no bit on tensor cores") {
  const Settings lens{.lens = true}, masked{.causal = true, .bool_mask = true};
  check_bits<BFloat16>({2, 1, 2, 41, 150, 64, 64}, lens, 501);
  check_bits<BFloat16>({2, 1, 2, 41, 150, 64, 64}, masked, 502);
  check_bits<Float16>({2, 2, 2, 2, 700, 64, 64}, lens, 503);
  check_bits<Float16>({2, 2, 2, 2, 700, 64, 64}, masked, 504);
  check_bits<BFloat16>({1, 1, 20, 1, 40, 576, 512}, {.bool_mask = true, .latent = true}, 505);
}

TEST_CASE("the smallest number in a mask excludes nothing and breaks nothing") {
  for (const Settings& on :
       {Settings{.float_mask = true, .lowest = true}, Settings{.float_mask = true, .lowest_rows = true},
        Settings{.causal = true, .sinks = true, .float_mask = true, .lowest = true, .lowest_rows = true}}) {
    check<float>({1, 2, 2, 7, 90, 20, 33}, on, ForwardKernel::kExact, 801);
    check<BFloat16>({1, 2, 1, 40, 250, 64, 64}, on, ForwardKernel::kPrefill, 802);
    check<Float16>({1, 1, 2, 20, 130, 256, 200}, on, ForwardKernel::kPrefill, 803);
    check<BFloat16>({1, 2, 4, 2, 700, 128, 128}, on, ForwardKernel::kDecode, 804);
    Settings latent = on;
    latent.latent = true;
    check<BFloat16>({1, 1, 16, 1, 200, 576, 512}, latent, ForwardKernel::kLatent, 805);
  }
}

TEST_CASE("a row without keys is zero whatever its sink is") {
  const auto check_rows = [](auto storage, const Shape& shape) {
    using S = decltype(storage);
    Problem<S> problem(shape, {.lens = true, .sinks = true}, 701);
    std::fill(problem.lens.begin(), problem.lens.end(), 0);
    problem.sinks[0] = infinity<double>();
    problem.sinks[1] = std::nan("");
    run_forward_guarded<S>(problem.p, plan_forward(problem.p, problem.most_group, kDevice), 701);
    for (int64_t h = 0; h < problem.num_heads; ++h)
      for (int64_t i = 0; i < shape.q_len; ++i) {
        const double lse = problem.lse[h * shape.q_len + i], sink = problem.sinks[h];
        CHECK((std::isnan(sink) ? std::isnan(lse) : std::abs(lse - sink) < 1e-6 || lse == sink));
        for (int64_t d = 0; d < shape.v_head_dim; ++d) CHECK(widen(problem.out.at(0, h, i, d)) == 0);
      }
  };
  check_rows(float(), {1, 1, 3, 7, 50, 20, 33});
  check_rows(BFloat16(), {1, 1, 3, 41, 150, 64, 64});
  check_rows(Float16(), {1, 1, 3, 2, 700, 64, 64});
}

TEST_CASE("the seed of dropout may stand on the device") {
  Problem<BFloat16> by_value({1, 2, 1, 40, 150, 64, 64}, {.dropout = true}, 901),
      there(by_value.shape, by_value.on, 901);
  const int64_t seed = static_cast<int64_t>(by_value.p.dropout_seed);
  there.p.dropout_seed = 0;
  there.p.dropout_seed_at = &seed;
  const ForwardPlan plan = plan_forward(by_value.p, 1, kDevice);
  run_forward_guarded<BFloat16>(by_value.p, plan, 901);
  run_forward_guarded<BFloat16>(there.p, plan, 901);
  const size_t bytes = 2 * 40 * 64 * sizeof(BFloat16);
  CHECK(std::memcmp(by_value.out.data(), there.out.data(), bytes) == 0);
}

TEST_CASE("NaN and Inf are added by one reading of the others, or none") {
  constexpr int kColumns = 64;
  constexpr int64_t kKeys = 1000;
  struct Number {
    int64_t* reads;
    float operator()(int64_t key, int c) const {
      ++*reads;
      return key == 300 && c == 5 ? infinity<float>() : key == 701 && c == 9 ? std::nanf("") : 1.f;
    }
  };
  struct Sees {
    int64_t* asked;
    int64_t prepare(int64_t key) const { return key; }
    bool operator()(int owner, int64_t key) const {
      ++*asked;
      return owner != 3 || key != 701;
    }
  };
  for (const bool diverged : {false, true}) {
    std::vector<float> tile(8 * kColumns, diverged ? std::nanf("") : 2.f);
    int64_t reads = 0, asked = 0;
    const std::function<void()> body = [&] {
      add_broken(tile.data(), kColumns, {1, 2, 8, kColumns}, {0, kKeys}, Number{&reads}, Sees{&asked});
    };
    EmulatedBlock(32, 1).run(body);
    if (diverged) {
      CHECK(reads == 0);
      continue;
    }
    CHECK(reads <= kKeys * kColumns + 8 * 2 * kColumns);
    CHECK(asked <= 4 * 2);
    for (int owner = 0; owner < 8; ++owner)
      for (int c = 0; c < kColumns; ++c) {
        const float x = tile[owner * kColumns + c];
        if (owner % 2 == 1 && c == 5)
          CHECK(x == infinity<float>());
        else if (owner % 2 == 1 && owner != 3 && c == 9)
          CHECK(std::isnan(x));
        else
          CHECK(x == 2);
      }
  }
}

TEST_CASE("forward of drawn problems") {
  for (int seed = 600; seed < 600 + drawn_problems(8); ++seed) {
    std::mt19937 random(seed);
    const Settings on = draw_settings(random);
    const Shape shape = draw_shape(random, on);
    const bool sm90 = draw(random, 0, 1);
    const Device device{draw(random, 1, 20), sm90 || draw(random, 0, 1) ? 227 * 1024 : 99 * 1024, sm90};
    const int64_t storage = draw(random, 0, 7);
    if (storage < 3)
      check<BFloat16>(shape, on, {}, seed, device);
    else if (storage < 6)
      check<Float16>(shape, on, {}, seed, device);
    else if (storage == 6)
      check<float>(shape, on, {}, seed, device);
    else
      check<double>(shape, on, {}, seed, device);
  }
}
