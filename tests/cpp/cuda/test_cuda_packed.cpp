#include <optional>

#include "catch.h"
#include "cuda_packed.h"
#include "cuda_run.h"

// Packed sequences in one call of the CUDA kernels, run on an emulated block: each is what it is by itself.
using namespace attnpack;
using namespace attnpack::cuda;

namespace {

constexpr Device kOne{1, 227 * 1024}, kHopper{1, 227 * 1024, true}, kMany{60, 227 * 1024},
    kManyHopper{60, 227 * 1024, true};

// pages: of so many keys, or 0.
struct Packing {
  Offset offset = Offset::kAtEnd;
  int64_t pages = 0;
};

// Whether a call cuts a sequence into the same blocks, whether it is packed or alone.
bool same_blocks(const ForwardPlan& a, const ForwardPlan& b) {
  return a.kernel == b.kernel && a.width == b.width && a.tile_rows == b.tile_rows && a.parts == 1 && b.parts == 1;
}

// Returns how many sequences had the bits of a call by themselves.
template <class S>
int64_t check(const std::vector<Lengths>& lengths, const Shape& shape, const Settings& on, const Packing& packing,
              std::optional<ForwardKernel> kernel, int seed, const Device& device = kOne, int64_t broken = -1) {
  CAPTURE(seed, shape.head_dim, lengths.size());
  PackedProblem<S> x(lengths, shape, on, packing.offset, seed);
  if (broken >= 0) x.break_sequence(broken);
  if (packing.pages) x.use_pages(packing.pages);
  const ForwardPlan plan = plan_forward(x.p, x.most_group, device);
  if (kernel) CHECK(plan.kernel == *kernel);
  run_forward_guarded<S>(x.p, plan, seed);
  ForwardErrors<S> errors;
  int64_t same = 0;
  for (int64_t b = 0; b < static_cast<int64_t>(lengths.size()); ++b) {
    if (b == broken) continue;
    Problem<S>& alone = *x.sequences[b];
    const int64_t first = x.query_ends[b];
    for (int64_t h = 0; h < alone.num_heads; ++h)
      for (int64_t i = 0; i < alone.shape.q_len; ++i)
        errors.add(alone.row(0, h, i), x.lse[h * x.p.q_len + first + i],
                   [&](int64_t d) { return x.out.at(0, h, first + i, d); });
    const ForwardPlan of_alone = plan_forward(alone.p, alone.most_group, device);
    if (!same_blocks(plan, of_alone)) continue;
    run_forward_guarded<S>(alone.p, of_alone, seed + 1);
    const int64_t count = alone.shape.q_len;
    Tensor4<S> out = rows_of(x.out, first, count);
    CHECK(different_bits(alone.out, out) == 0);
    for (int64_t h = 0; h < alone.num_heads; ++h)
      CHECK(different_bits(alone.lse.data() + h * count, x.lse.data() + h * x.p.q_len + first, count) == 0);
    ++same;
  }
  CHECK(errors.wrong == 0);
  CHECK(errors.worst < (sizeof(S) == 2 ? 4.5 : 100));
  CHECK(errors.worst_lse < (std::is_same_v<S, double> ? 1e-13 : 2e-6));
  return same;
}

const std::vector<Lengths> kRagged = ragged_lengths(200);

}  // namespace

TEST_CASE("the tiles of packed sequences are those of each") {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const int64_t sequences = draw(random, 1, 9), members = draw(random, 1, 5), size = draw(random, 1, 40);
    std::vector<int64_t> ends{0};
    for (int64_t b = 0; b < sequences; ++b) ends.push_back(ends.back() + std::max<int64_t>(0, draw(random, -9, 60)));
    const int64_t tokens = ends.back(), tiles = count_packed_tiles(tokens, sequences, members, size);
    std::vector<int64_t> found(sequences);
    int64_t wrong = 0, beyond = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const PackedTile tile = packed_tile(ends.data(), tokens, sequences, members, size, t);
      wrong += tile.tile != found[tile.sequence]++;
      beyond += tile.tile * size >= (ends[tile.sequence + 1] - ends[tile.sequence]) * members;
    }
    for (int64_t b = 0; b < sequences; ++b) wrong += found[b] * size < (ends[b + 1] - ends[b]) * members;
    CHECK(wrong == 0);
    CHECK(beyond <= sequences);
  }
}

TEST_CASE("ends of packed sequences that are wrong lead nowhere else") {
  std::mt19937 random(2);
  int64_t wrong = 0;
  for (int i = 0; i < 1000; ++i) {
    const int64_t sequences = draw(random, 1, 9), members = draw(random, 1, 5), size = draw(random, 1, 40), tokens = 60;
    std::vector<int64_t> ends;
    for (int64_t b = 0; b <= sequences; ++b) ends.push_back(draw(random, -20, 80));
    for (int64_t t = 0; t < count_packed_tiles(tokens, sequences, members, size); ++t) {
      const PackedTile tile = packed_tile(ends.data(), tokens, sequences, members, size, t);
      wrong += tile.sequence < 0 || tile.sequence >= sequences || tile.tile < 0;
    }
    for (int64_t b = 0; b < sequences; ++b) {
      const Range rows = rows_of_sequence(ends.data(), tokens, b);
      wrong += rows.begin < 0 || rows.end < rows.begin || rows.end > tokens;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("packed prefill") {
  int seed = 100;
  for (const Settings& on : packed_grid())
    CHECK(check<BFloat16>(kRagged, {1, kv_heads_of(on), 2, 0, 0, 64, 64}, on, {}, ForwardKernel::kPrefill, ++seed) > 0);
  check<Float16>(kRagged, {1, 2, 1, 0, 0, 128, 104}, {.causal = true}, {Offset::kEach}, ForwardKernel::kPrefill,
                 ++seed);
  check<BFloat16>(kRagged, {1, 1, 2, 0, 0, 192, 128}, {.causal = true}, {}, ForwardKernel::kPrefill, ++seed);
  check<Float16>({{20, 30}, {40, 90}}, {1, 1, 2, 0, 0, 256, 256}, {.window = true}, {Offset::kNumber},
                 ForwardKernel::kPrefill, ++seed);
  check<BFloat16>({{30, 500}, {40, 700}, {9, 9}}, {1, 1, 2, 0, 0, 64, 40}, {.causal = true}, {},
                  ForwardKernel::kPrefill, ++seed, kMany);  // in parts
}

TEST_CASE("packed rows of other kernels") {
  int seed = 200;
  CHECK(check<float>(kRagged, {1, 2, 2, 0, 0, 20, 33}, {.causal = true}, {}, ForwardKernel::kExact, ++seed) > 0);
  check<double>(kRagged, {1, 3, 1, 0, 0, 8, 5}, {.softcap = true, .map = true}, {Offset::kEach}, ForwardKernel::kExact,
                ++seed, kMany);
  const std::vector<Lengths> few{{2, 300}, {1, 77}, {0, 20}, {3, 0}, {2, 64}};
  CHECK(check<BFloat16>(few, {1, 2, 4, 0, 0, 64, 64}, {.causal = true}, {}, ForwardKernel::kDecode, ++seed) > 0);
  check<Float16>(few, {1, 1, 3, 0, 0, 128, 128}, {.window = true, .sinks = true}, {}, ForwardKernel::kDecode, ++seed,
                 kMany);
  const Settings latent{.causal = true, .latent = true};
  check<BFloat16>(few, {1, 1, 8, 0, 0, 576, 512}, latent, {}, ForwardKernel::kLatent, ++seed);
  check<Float16>(few, {1, 1, 8, 0, 0, 576, 512}, latent, {}, ForwardKernel::kLatentSm90, ++seed, kHopper);
}

TEST_CASE("packed prefill on sm_90") {
  int seed = 300;
  for (const Settings& on : packed_grid())
    CHECK(check<BFloat16>(kRagged, {1, kv_heads_of(on), 2, 0, 0, 64, 64}, on, {}, ForwardKernel::kSm90, ++seed,
                          kHopper) > 0);
  check<Float16>(kRagged, {1, 1, 2, 0, 0, 128, 104}, {.causal = true}, {Offset::kEach}, ForwardKernel::kSm90, ++seed,
                 kHopper);
  check<BFloat16>(kRagged, {1, 1, 1, 0, 0, 192, 128}, {.causal = true}, {}, ForwardKernel::kSm90, ++seed, kHopper);
  check<BFloat16>(kRagged, {1, 1, 1, 0, 0, 256, 200}, {.window = true}, {}, ForwardKernel::kSm90, ++seed, kHopper);
  check<Float16>({{30, 500}, {40, 700}, {9, 9}}, {1, 1, 1, 0, 0, 40, 24}, {.causal = true}, {}, ForwardKernel::kSm90,
                 ++seed, kManyHopper);  // in parts
}

TEST_CASE("no number of another packed sequence reaches a row") {
  int seed = 400;
  for (const Device& device : {kOne, kHopper})
    for (const int64_t broken : {0, 4, 6}) {
      const auto kernel = device.sm90 ? ForwardKernel::kSm90 : ForwardKernel::kPrefill;
      check<BFloat16>(kRagged, {1, 1, 2, 0, 0, 64, 64}, {}, {}, kernel, ++seed, device, broken);
      check<Float16>(kRagged, {1, 1, 1, 0, 0, 128, 64}, {.causal = true}, {}, kernel, ++seed, device, broken);
    }
}

TEST_CASE("packed prefill and decode over pages") {
  int seed = 500;
  for (const Settings& on : packed_grid())
    CHECK(check<BFloat16>(kRagged, {1, kv_heads_of(on), 2, 0, 0, 64, 64}, on, {Offset::kAtEnd, 16},
                          ForwardKernel::kPrefill, ++seed) >= 0);
  check<Float16>(kRagged, {1, 2, 1, 0, 0, 128, 104}, {.causal = true}, {Offset::kEach, 7}, ForwardKernel::kPrefill,
                 ++seed);
  check<BFloat16>(kRagged, {1, 1, 2, 0, 0, 192, 128}, {.causal = true, .poison = true}, {Offset::kAtEnd, 33},
                  ForwardKernel::kPrefill, ++seed);
  check<Float16>({{20, 30}, {40, 90}}, {1, 1, 2, 0, 0, 256, 256}, {.window = true}, {Offset::kNumber, 5},
                 ForwardKernel::kPrefill, ++seed, kHopper);
  check<BFloat16>({{30, 500}, {40, 700}, {9, 9}}, {1, 1, 2, 0, 0, 64, 40}, {.causal = true}, {Offset::kAtEnd, 16},
                  ForwardKernel::kPrefill, ++seed, kMany);  // in parts
  const std::vector<Lengths> few{{2, 300}, {1, 77}, {0, 20}, {3, 0}, {2, 64}};
  check<BFloat16>(few, {1, 2, 4, 0, 0, 64, 64}, {.causal = true}, {Offset::kAtEnd, 16}, ForwardKernel::kDecode, ++seed);
  check<Float16>(few, {1, 1, 3, 0, 0, 128, 128}, {.window = true, .sinks = true}, {Offset::kEach, 9},
                 ForwardKernel::kDecode, ++seed, kMany);
  for (const int64_t broken : {0, 4, 6})
    check<Float16>(kRagged, {1, 1, 2, 0, 0, 64, 64}, {}, {Offset::kAtEnd, 16}, ForwardKernel::kPrefill, ++seed, kOne,
                   broken);
}

TEST_CASE("forward of drawn packed sequences") {
  for (int seed = 600; seed < 600 + drawn_problems(16); ++seed) {
    std::mt19937 random(seed);
    Settings on = draw_settings(random);
    on.past = on.lens = on.offsets = on.bool_mask = on.float_mask = on.dropout = on.latent = false;
    const Shape shape = draw_shape(random, on);
    Packing packing{static_cast<Offset>(draw(random, 0, 2))};
    const std::vector<Lengths> lengths = draw_lengths(random, false);
    const bool sm90 = draw(random, 0, 1);
    const Device device{draw(random, 0, 1) ? 1 : 40, sm90 || draw(random, 0, 1) ? 227 * 1024 : 99 * 1024, sm90};
    const int64_t broken = draw(random, -2, static_cast<int64_t>(lengths.size()) - 1);
    const int64_t storage = draw(random, 0, 6);
    const bool paged = storage < 6 && shape.head_dim % 8 == 0 && shape.v_head_dim % 8 == 0 && draw(random, 0, 1);
    if (paged) packing.pages = draw(random, 1, 40);
    if (storage < 3)
      check<BFloat16>(lengths, shape, on, packing, {}, seed, device, broken);
    else if (storage < 6)
      check<Float16>(lengths, shape, on, packing, {}, seed, device, broken);
    else
      check<float>(lengths, shape, on, packing, {}, seed, device, broken);
  }
}
