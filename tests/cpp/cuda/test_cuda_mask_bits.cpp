#include <random>

#include "catch.h"
#include "cuda_problem.h"
#include "cuda_run_sm90.h"

// The bits of a bool mask and the lists of its steps, made by the kernels' source on an emulated block, against the
// mask's numbers.
using namespace attnpack;
using namespace attnpack::cuda;

namespace {

// A drawn call with a mask, whose dimensions are broadcast or lie in drawn order. Of each 100 rows and 200 keys all
// pairs are seen, or hidden, or some.
struct MaskedCall {
  AttentionParams p{};
  HeadGroups groups;
  std::vector<char> numbers;
  std::vector<int64_t> lens, offsets;
  int64_t most_group = 0;

  explicit MaskedCall(std::mt19937& random) {
    const auto coin = [&] { return draw(random, 0, 1) == 1; };
    p.batch = draw(random, 1, 2);
    p.num_kv_heads = draw(random, 1, 3);
    p.num_heads = p.num_kv_heads * draw(random, 1, 3);
    p.q_len = draw(random, 1, 150);
    p.kv_len = draw(random, 1, coin() ? 300 : 4500);
    p.window_left = p.window_right = -1;
    std::vector<int64_t> map;
    for (int64_t h = 0; h < p.num_heads; ++h) map.push_back(h * h % 3 % p.num_kv_heads);
    groups = group_heads(map, p.num_kv_heads);
    if (coin()) {
      p.group_start = groups.start.data();
      p.group_heads = groups.heads.data();
    }
    for (int64_t kv = 0; kv < p.num_kv_heads; ++kv) most_group = std::max(most_group, group_size(p, kv));
    const int64_t columns = coin() || coin() ? p.kv_len : 1, rows = coin() ? p.q_len : 1,
                  heads = coin() ? p.num_heads : 1, batches = coin() ? p.batch : 1;
    numbers.resize(batches * heads * rows * columns);
    for (size_t i = 0; i < numbers.size(); ++i) {
      const int64_t kind = (i % columns / 200 + i / columns / 100) % 3;
      numbers[i] = kind == 2 ? coin() : kind == 1;
    }
    const bool turned = coin();
    const auto stride = [](int64_t size, int64_t s) { return size > 1 ? s : 0; };
    p.mask = numbers.data();
    p.mask_dtype = DType::kBool;
    p.mask_strides = {stride(batches, heads * rows * columns), stride(heads, rows * columns),
                      stride(rows, turned ? 1 : columns), stride(columns, turned ? rows : 1)};
    for (int64_t b = 0; b < p.batch; ++b) {
      lens.push_back(draw(random, 0, p.kv_len));
      offsets.push_back(draw(random, -20, p.kv_len));
    }
  }
  void add_ranges(std::mt19937& random) {
    p.causal = draw(random, 0, 1);
    if (draw(random, 0, 1)) p.kv_lens = lens.data();
    if (draw(random, 0, 1)) p.q_offsets = offsets.data();
    if (draw(random, 0, 2) == 0) p.window_left = draw(random, 0, 150);
  }
  bool number(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const Strides& s = p.mask_strides;
    return numbers[b * s.batch + h * s.head + i * s.row + j * s.column] != 0;
  }
};

std::vector<int32_t> numbers_of(const ListedSteps& steps) { return {steps.numbers, steps.numbers + steps.count}; }

}  // namespace

TEST_CASE("a mask's bits are its numbers, and the lists of rows hold the steps of keys that they see") {
  std::mt19937 random(17);
  for (int round = 0; round < 30; ++round) {
    const MaskedCall call(random);
    const AttentionParams& p = call.p;
    const int64_t tiles = (call.most_group * p.q_len + 127) / 128;
    const MaskBits m = plan_mask_bits(p, draw(random, 0, 50));
    const MaskLists l = plan_key_lists(p, tiles, draw(random, 0, 1) ? 128 : 64, end_of(m));
    Guarded memory(end_of(l));
    void* const workspace = memory.data();
    std::memset(workspace, 0xff, memory.bytes());
    run_pack_mask(p, m, workspace, round);
    run_list_keys(p, m, l, 128, workspace, round);
    int64_t wrong = 0;
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t h = 0; h < p.num_heads; ++h)
        for (int64_t i = 0; i < p.q_len; ++i) {
          const uint32_t* words = mask_row(m, workspace, b, h, i);
          wrong += reinterpret_cast<uintptr_t>(words) % 16 != 0;  // read at once
          for (int64_t j = 0; j < p.kv_len; ++j) wrong += (words[j / 32] >> j % 32 & 1) != call.number(b, h, i, j);
        }
    CHECK(wrong == 0);
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t kv = 0; kv < p.num_kv_heads; ++kv)
        for (int64_t tile = 0; tile < tiles; ++tile) {
          const int64_t from = draw(random, 0, p.kv_len), to = draw(random, from, p.kv_len), group = group_size(p, kv);
          if (128 * tile >= group * p.q_len) continue;  // no rows
          const Range keys = from < to ? Range{from, to} : Range{0, 0};
          std::vector<int32_t> wanted;
          for (int64_t step = keys.begin / l.step; step * l.step < keys.end; ++step) {
            bool seen = false, hidden = false;
            for (int64_t r = 128 * tile; r < std::min(128 * (tile + 1), group * p.q_len); ++r)
              for (int64_t j = step * l.step; j < std::min((step + 1) * l.step, p.kv_len); ++j) {
                const bool sees = call.number(b, group_head(p, kv, r % group), r / group, j);
                seen |= sees;
                hidden |= !sees;
              }
            if (seen) wanted.push_back(static_cast<int32_t>(2 * step + hidden));
          }
          CHECK(numbers_of(steps_of_keys(l, workspace, b, kv, tile, keys)) == wanted);
        }
  }
}

TEST_CASE("the lists of keys hold the steps of rows that see them, by mask and ranges") {
  std::mt19937 random(18);
  for (int round = 0; round < 30; ++round) {
    MaskedCall call(random);
    call.add_ranges(random);
    const AttentionParams& p = call.p;
    constexpr int64_t kTile = kBackwardOwnersSm90;
    const int64_t rows = draw(random, 0, 1) ? 64 : 32, tiles = (p.kv_len + kTile - 1) / kTile,
                  of_head = (p.q_len + rows - 1) / rows;
    const MaskBits m = plan_mask_bits(p, 0);
    const MaskLists l = plan_row_lists(p, tiles, rows, call.most_group, end_of(m));
    Guarded memory(end_of(l));
    void* const workspace = memory.data();
    std::memset(workspace, 0xff, memory.bytes());
    run_pack_mask(p, m, workspace, round);
    run_list_rows(p, m, l, workspace, round);
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t kv = 0; kv < p.num_kv_heads; ++kv)
        for (int64_t tile = 0; tile < tiles; ++tile) {
          std::vector<int32_t> wanted;
          for (int64_t step = 0; step < group_size(p, kv) * of_head; ++step) {
            bool seen = false, hidden = false;
            const int64_t head = group_head(p, kv, step / of_head), first = step % of_head * rows;
            for (int64_t i = first; i < std::min(first + rows, p.q_len); ++i) {
              const Range keys = key_range(p, b, i);
              for (int64_t j = tile * kTile; j < std::min((tile + 1) * kTile, p.kv_len); ++j) {
                const bool left = call.number(b, head, i, j);
                seen |= left && j >= keys.begin && j < keys.end;
                hidden |= !left;
              }
            }
            if (seen) wanted.push_back(static_cast<int32_t>(2 * step + hidden));
          }
          CHECK(numbers_of(steps_of_rows(l, workspace, b, kv, tile)) == wanted);
        }
  }
}

TEST_CASE("a list of more rows than 32 bits count") {
  // Two heads of a kv head. The first one sees the last 2 keys, the second one all but these.
  AttentionParams p{};
  p.batch = p.num_kv_heads = 1;
  p.num_heads = 2;
  p.q_len = (int64_t{1} << 30) + 100;
  p.kv_len = 130;
  std::vector<char> numbers(2 * 130);
  for (int64_t i = 0; i < 130; ++i) numbers[i < 128 ? 130 + i : i] = true;
  p.mask = numbers.data();
  p.mask_dtype = DType::kBool;
  p.mask_strides = {0, 130, 0, 1};
  const MaskBits m = plan_mask_bits(p, 0);
  const MaskLists l = plan_key_lists(p, (2 * p.q_len + 127) / 128, 128, end_of(m));
  Guarded memory(end_of(l)), shared(sizeof(MaskListShared));  // of which little is touched
  run_pack_mask(p, m, memory.data(), 1);
  EmulatedBlock(kMaskThreads, 1).run([&] {
    list_keys_block(p, m, l, 128, memory.data(), l.tiles - 1, *static_cast<MaskListShared*>(shared.data()));
  });
  CHECK(numbers_of(steps_of_keys(l, memory.data(), 0, 0, l.tiles - 1, {0, 130})) == std::vector<int32_t>{1, 3});
}

TEST_CASE("the kernels read bits where 32 bits count them") {
  alignas(16) char memory[16] = {};
  const auto stores = [&](int64_t batch, int64_t q_len, int64_t kv_len, const Strides& mask, int64_t head_dim = 64) {
    AttentionParams p{};
    p.batch = batch;
    p.num_heads = p.num_kv_heads = 1;
    p.q_len = q_len;
    p.kv_len = kv_len;
    p.head_dim = head_dim;
    p.v_head_dim = 64;
    p.dtype = DType::kBFloat16;
    p.scale = 1;
    p.window_left = p.window_right = -1;
    p.query = p.key = p.value = p.mask = p.out = memory;
    p.query_strides = p.key_strides = p.value_strides = {0, 0, head_dim, 1};
    p.mask_dtype = DType::kBool;
    p.mask_strides = mask;
    const Device device{132, 227 * 1024, true};
    const ForwardPlan plan = plan_forward(p, 1, device);
    CHECK(plan.kernel == ForwardKernel::kSm90);
    CHECK(is_masked(p) == (plan.mask.rows > 0));
    AttentionBackwardParams bp{p};
    bp.grad_out = bp.grad_query = bp.grad_key = bp.grad_value = memory;
    bp.grad_out_strides = bp.grad_query_strides = bp.grad_key_strides = bp.grad_value_strides = p.query_strides;
    const BackwardPlan backward = plan_backward(bp, 1, device);
    CHECK(backward.sm90 == (is_masked(p) || head_dim <= 128));
    CHECK((backward.mask.rows > 0) == is_masked(p));
    if (is_masked(p)) {
      CHECK(mask_blocks(plan.mask) <= std::numeric_limits<int32_t>::max());
      CHECK(end_of(plan.mask) / 16 <= std::numeric_limits<uint32_t>::max());
    }
    return is_masked(p);
  };
  constexpr int64_t kRows = int64_t{1} << 18, kKeys = int64_t{1} << 17;  // 4 GiB of bits
  for (const int64_t head_dim : {64, 192}) {
    CHECK(stores(1, kRows, kKeys, {0, 0, kKeys, 1}, head_dim));
    CHECK(!stores(1, kRows + 1, kKeys, {0, 0, kKeys, 1}, head_dim));
  }
  CHECK(!stores(2, kRows, kKeys, {kRows, 0, 1, 0}));  // of few numbers, which all keys share
  CHECK(stores(2, kRows, kKeys, {0, 0, kKeys, 1}));
  CHECK(stores(2, int64_t{1} << 27, 1, {int64_t{1} << 27, 0, 1, 1}));
  CHECK(!stores(3, int64_t{1} << 27, 1, {int64_t{1} << 27, 0, 1, 1}));
}

TEST_CASE("tiles whose rows share a mask share a list") {
  AttentionParams p{};
  p.batch = p.num_kv_heads = 2;
  p.num_heads = 4;
  p.q_len = p.kv_len = 1000;
  const auto lists = [&](const Strides& mask) {
    p.mask_strides = mask;
    return count_lists(plan_key_lists(p, 16, 128, 0));
  };
  CHECK(lists({0, 0, 0, 1}) == 1);
  CHECK(lists({1000, 0, 0, 1}) == 2);
  CHECK(lists({0, 1000, 0, 1}) == 2 * 16);
  CHECK(lists({0, 0, 1000, 1}) == 16);
}
