#include "catch.h"
#include "cuda_gradients.h"
#include "cuda_packed.h"
#include "cuda_run.h"

// Gradients of packed sequences by one call of the CUDA kernels, run on an emulated block: each has those that it has
// by itself.
using namespace attnpack;
using namespace attnpack::cuda;

namespace {

enum class On { kExact, kTensorCores, kSm90 };

Device device_of(On on, int64_t multiprocessors) { return {multiprocessors, 227 * 1024, on == On::kSm90}; }

bool one_part(const BackwardPlan& plan) {
  return plan.width == 0 || (plan.of_rows.parts == 1 && plan.of_keys.parts == 1);
}

// Returns how many sequences had the bits of a call by themselves. broken, rows_broken: the sequence that is, or whose
// rows are.
template <class S>
int64_t check(const std::vector<Lengths>& lengths, const Shape& shape, const Settings& on, Offset offset, On kernel,
              int seed, int64_t multiprocessors = 1, int64_t broken = -1, int64_t rows_broken = -1) {
  CAPTURE(seed, shape.head_dim, lengths.size());
  const int64_t sequences = static_cast<int64_t>(lengths.size());
  PackedProblem<S> x(lengths, shape, on, offset, seed);
  if (broken >= 0) x.break_sequence(broken);
  if (rows_broken >= 0) x.break_rows(rows_broken);
  std::vector<std::unique_ptr<Gradients<S>>> truth;
  for (int64_t b = 0; b < sequences; ++b) {
    Problem<S>& alone = *x.sequences[b];
    alone.delta.assign(alone.lse.size(), 0);
    alone.bp.delta = alone.delta.data();
    truth.push_back(std::make_unique<Gradients<S>>(alone));
    for (int64_t h = 0; h < alone.num_heads; ++h)
      for (int64_t i = 0; i < alone.shape.q_len; ++i) {
        const int64_t from = h * alone.shape.q_len + i, to = h * x.p.q_len + x.query_ends[b] + i;
        x.lse[to] = alone.lse[from];
        x.delta[to] = alone.delta[from];
      }
  }
  const Device device = device_of(kernel, multiprocessors);
  const BackwardPlan plan = plan_backward(x.bp, x.most_group, device);
  CHECK((plan.width > 0) == (kernel != On::kExact));
  CHECK(plan.sm90 == (kernel == On::kSm90));
  if (multiprocessors > 50 && kernel != On::kExact) CHECK(!one_part(plan));
  run_backward_guarded<S>(x.bp, plan, seed);
  int64_t same = 0;
  for (int64_t b = 0; b < sequences; ++b) {
    if (b == broken) continue;
    Problem<S>& alone = *x.sequences[b];
    Tensor4<S> query = rows_of(x.grad_query, x.query_ends[b], lengths[b].queries),
               key = rows_of(x.grad_key, x.key_ends[b], lengths[b].keys),
               value = rows_of(x.grad_value, x.key_ends[b], lengths[b].keys);
    compare(query, truth[b]->query, 1);
    compare(key, truth[b]->key, 1);
    compare(value, truth[b]->value, 1);
    const BackwardPlan of_alone = plan_backward(alone.bp, alone.most_group, device);
    if (of_alone.width != plan.width || of_alone.sm90 != plan.sm90 || !one_part(plan) || !one_part(of_alone)) continue;
    run_backward_guarded<S>(alone.bp, of_alone, seed + 1);
    CHECK(different_bits(alone.grad_query, query) == 0);
    CHECK(different_bits(alone.grad_key, key) == 0);
    CHECK(different_bits(alone.grad_value, value) == 0);
    ++same;
  }
  return same;
}

const std::vector<Lengths> kRagged = ragged_lengths(150);

}  // namespace

TEST_CASE("exact packed backward") {
  CHECK(check<float>(kRagged, {1, 2, 2, 0, 0, 20, 33}, {.causal = true}, Offset::kAtEnd, On::kExact, 1) > 0);
  CHECK(check<double>(kRagged, {1, 3, 1, 0, 0, 8, 5}, {.softcap = true, .map = true}, Offset::kEach, On::kExact, 2) >
        0);
}

TEST_CASE("packed backward on tensor cores") {
  int seed = 100;
  for (const Settings& on : packed_grid())
    CHECK(check<BFloat16>(kRagged, {1, kv_heads_of(on), 2, 0, 0, 64, 40}, on, Offset::kAtEnd, On::kTensorCores,
                          ++seed) > 0);
  check<Float16>(kRagged, {1, 2, 1, 0, 0, 128, 104}, {.causal = true}, Offset::kEach, On::kTensorCores, ++seed);
  check<BFloat16>({{20, 70}, {0, 3}, {30, 33}}, {1, 1, 2, 0, 0, 192, 128}, {.causal = true, .poison = true},
                  Offset::kNumber, On::kTensorCores, ++seed);
}

TEST_CASE("packed backward on sm_90") {
  int seed = 200;
  for (const Settings& on : packed_grid())
    CHECK(check<BFloat16>(kRagged, {1, kv_heads_of(on), 2, 0, 0, 64, 40}, on, Offset::kAtEnd, On::kSm90, ++seed) > 0);
  check<Float16>(kRagged, {1, 2, 1, 0, 0, 128, 104}, {.causal = true}, Offset::kEach, On::kSm90, ++seed);
  check<BFloat16>({{20, 70}, {0, 3}, {30, 133}}, {1, 1, 2, 0, 0, 192, 128}, {.causal = true, .poison = true},
                  Offset::kNumber, On::kSm90, ++seed);
}

TEST_CASE("packed gradients whose sums are cut into parts") {
  int seed = 300;
  for (const On kernel : {On::kTensorCores, On::kSm90}) {
    check<BFloat16>({{20, 530}, {7, 9}, {30, 300}}, {1, 1, 2, 0, 0, 64, 40}, {.causal = true}, Offset::kAtEnd, kernel,
                    ++seed, 132);
    check<Float16>({{9, 7}, {270, 70}, {300, 30}}, {1, 1, 2, 0, 0, 64, 64}, {.window = true}, Offset::kAtEnd, kernel,
                   ++seed, 132);
  }
}

TEST_CASE("no number of another packed sequence reaches a gradient") {
  int seed = 400;
  for (const On kernel : {On::kTensorCores, On::kSm90}) {
    for (const int64_t broken : {0, 6})
      check<BFloat16>(kRagged, {1, 1, 2, 0, 0, 64, 64}, {}, Offset::kAtEnd, kernel, ++seed, 1, broken);
    check<Float16>(kRagged, {1, 1, 1, 0, 0, 128, 64}, {.causal = true}, Offset::kAtEnd, kernel, ++seed, 1, 4);
  }
}

// The products of such a row are NaN in the first pass. The second one adds NaN to the keys that it sees.
TEST_CASE("NaN of a packed row reaches the keys that it sees") {
  int seed = 500;
  for (const On kernel : {On::kTensorCores, On::kSm90})
    for (const bool causal : {false, true})
      check<BFloat16>(kRagged, {1, 1, 2, 0, 0, 64, 64}, {.causal = causal}, Offset::kAtEnd, kernel, ++seed, 1, -1, 4);
}

TEST_CASE("backward of drawn packed sequences") {
  for (int seed = 600; seed < 600 + drawn_problems(8); ++seed) {
    std::mt19937 random(seed);
    Settings on = draw_settings(random);
    on.past = on.lens = on.offsets = on.bool_mask = on.float_mask = on.dropout = on.latent = false;
    const Shape shape = draw_shape(random, on);
    const auto offset = static_cast<Offset>(draw(random, 0, 2));
    const std::vector<Lengths> lengths = draw_lengths(random, draw(random, 0, 1));
    int64_t queries = 0, keys = 0;
    for (const Lengths& each : lengths) queries += each.queries, keys += each.keys;
    const bool whole_chunks = shape.head_dim % 8 == 0 && shape.v_head_dim % 8 == 0;
    const int64_t width = backward_width_sm90(shape.head_dim, shape.v_head_dim);
    const bool fits_sm90 =
        queries > 0 && keys > 0 && (on.softcap || on.alibi ? width == 64 || width == 128 : width > 0);
    const On kernel = !whole_chunks ? On::kExact : fits_sm90 && draw(random, 0, 1) ? On::kSm90 : On::kTensorCores;
    const int64_t broken = draw(random, -2, static_cast<int64_t>(lengths.size()) - 1);
    if (draw(random, 0, 1))
      check<BFloat16>(lengths, shape, on, offset, kernel, seed, 1, broken);
    else
      check<Float16>(lengths, shape, on, offset, kernel, seed, 1, broken);
  }
}
