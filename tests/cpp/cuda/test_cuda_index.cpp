#include <random>
#include <set>
#include <vector>

#include "catch.h"
#include "cuda_emulator.h"

#include <attnpack/ops/cuda/kernels/usable.h>
#include <attnpack/ops/cuda/kernels/exact.cuh>
#include <attnpack/ops/cuda/kernels/forward_latent.cuh>
#include <attnpack/ops/cuda/kernels/forward_mma.cuh>
#include <attnpack/ops/cuda/kernels/gradient_parts.cuh>

// The arithmetic on indices of the CUDA kernels, against brute force.
using namespace attnpack;
using namespace attnpack::cuda;

TEST_CASE("swizzled chunks are a permutation without bank conflicts") {
  for (int width : {64, 128, 256, 576}) {
    for (int row = 0; row < 64; ++row) {
      std::set<int> places;
      for (int chunk = 0; chunk < width / 8; ++chunk) places.insert(swizzled_offset(row, chunk, width));
      CHECK(static_cast<int>(places.size()) == width / 8);
      CHECK(*places.begin() == row * width);
      CHECK(*places.rbegin() == row * width + width - 8);
    }
    for (int row = 0; row < 64; row += 8)
      for (int chunk = 0; chunk < width / 8; ++chunk) {
        std::set<int> banks;  // a load of a matrix reads eight rows of 16 bytes: all 32 banks of 4 bytes, once
        for (int r = row; r < row + 8; ++r) banks.insert(swizzled_offset(r, chunk, width) * 2 / 16 % 8);
        CHECK(banks.size() == 8);
      }
  }
}

TEST_CASE("fragments cover their operands, each element once") {
  std::set<int> a, b, c;
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < 4; ++reg)
      for (int half = 0; half < 2; ++half)
        a.insert(place_in_a(lane, reg, half).row * 16 + place_in_a(lane, reg, half).column);
    for (int reg = 0; reg < 2; ++reg)
      for (int half = 0; half < 2; ++half)
        b.insert(place_in_b(lane, reg, half).row * 8 + place_in_b(lane, reg, half).column);
    for (int i = 0; i < 4; ++i) c.insert(place_in_c(lane, i).row * 8 + place_in_c(lane, i).column);
  }
  CHECK(a.size() == 256);
  CHECK(b.size() == 128);
  CHECK(c.size() == 128);
}

TEST_CASE("a fragment C of two neighbouring products is a fragment A") {
  for (int lane = 0; lane < 32; ++lane)
    for (int reg = 0; reg < 4; ++reg)
      for (int half = 0; half < 2; ++half) {
        const Place to = place_in_a(lane, reg, half), from = place_in_c(lane, 2 * (reg & 1) + half);
        CHECK(to.row == from.row);
        CHECK(to.column == from.column + 8 * (reg >> 1));
      }
}

TEST_CASE("a chunk further on is where its own number says") {
  for (int width : {64, 128, 256})
    for (int row = 0; row < 16; ++row)
      for (int chunk : {0, 1})
        for (int more = 0; more + chunk < width / 8; more += 2)
          CHECK(swizzled_further(swizzled_offset(row, chunk, width), more) ==
                swizzled_offset(row, chunk + more, width));
}

TEST_CASE("matrices load as the operands' fragments") {
  std::vector<uint16_t> x(16 * 16);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(i);
  const std::function<void()> body = [&] {
    const int lane = thread_id();
    const auto load = [&](Place at, bool transposed) {
      std::vector<uint32_t> r(4);
      uint32_t to[4];
      const void* row = &x[at.row * 16 + at.column * 8];
      transposed ? load_matrices_transposed(to, row) : load_matrices(to, row);
      return std::vector<uint32_t>(to, to + 4);
    };
    const auto a = load(lane_for_a(lane), false), keys = load(lane_for_b(lane), false),
               values = load(lane_for_b_transposed(lane), true);
    for (int reg = 0; reg < 4; ++reg)
      for (int half = 0; half < 2; ++half) {
        const auto element = [&](const std::vector<uint32_t>& v) {
          return static_cast<int>(v[reg] >> 16 * half & 0xffff);
        };
        const Place in_a = place_in_a(lane, reg, half), in_b = place_in_b(lane, reg % 2, half);
        CHECK(element(a) == in_a.row * 16 + in_a.column);
        CHECK(element(keys) == (in_b.column + reg / 2 * 8) * 16 + in_b.row);
        CHECK(element(values) == in_b.row * 16 + in_b.column + reg / 2 * 8);
      }
  };
  EmulatedBlock(32, 1).run(body);
}

TEST_CASE("splits cover every key once and follow only shapes") {
  for (int64_t kv_len : {0, 1, 63, 64, 65, 255, 256, 257, 1000, 4096, 65536, 1000003})
    for (int64_t blocks : {1, 2, 8, 100, 132, 5000})
      for (int64_t at_once : {1, 108, 132, 264}) {
        const int64_t parts = parts_of_keys(blocks, at_once, kv_len);
        CHECK(parts >= 1);
        CHECK(parts <= kMostParts);
        if (parts > 1) {
          CHECK(parts * 2 * kSplitStep <= kv_len + kSplitStep);
          CHECK(5 * blocks < 4 * at_once);
        }
      }
  CHECK(parts_of_keys(8, 264, 65536) > 16);
  // By arithmetic, for 264 places. 8 blocks: 64 steps make 32 parts of 2, so 256 places have work; 2,048 steps make 32
  // of 64 rather than 33 of 63. 1 block: 16 steps make 8 parts. 2 steps are one part. 8 blocks of 132 places: 911 steps
  // make 16 parts of 57, where 33 of 28 take two waves.
  CHECK(parts_of_keys(8, 264, 4096) == 32);
  CHECK(parts_of_keys(8, 264, 131072) == 32);
  CHECK(parts_of_keys(1, 264, 1000) == 8);
  CHECK(parts_of_keys(8, 264, 128) == 1);
  CHECK(parts_of_keys(8, 132, 58254) == 16);
}

TEST_CASE("tiles of 192 rows pay where blocks are many") {
  const auto rows_of = [](int64_t rows, int64_t heads, int64_t width = 64, bool plain = true) {
    return forward_rows_sm90(width, plain, rows, heads, 132);
  };
  // By arithmetic, for 132 places. 8 kv heads of 4 * 8,192 rows: 16 waves of 128 rows, or 11 of 192, which ends at row
  // 2,112 rather than 2,048. 8 heads of 1,024 rows, and 2 of 8,192: one wave of either. 3 heads of 16,384: three waves
  // of 128 rows, or two of 192.
  CHECK(rows_of(4 * 8192, 8) == 192);
  CHECK(rows_of(1024, 8) == 128);
  CHECK(rows_of(8192, 2) == 128);
  CHECK(rows_of(16384, 3) == 192);
  CHECK(rows_of(4 * 8192, 8, 128) == 128);
  CHECK(rows_of(4 * 8192, 8, 64, false) == 128);
}

TEST_CASE("gradients are cut into parts where owners are few") {
  alignas(16) char memory[16] = {};
  const auto plan_of = [&](int64_t num_heads, int64_t num_kv_heads, int64_t length, bool sm90) {
    AttentionParams p{};
    p.batch = 1;
    p.num_heads = num_heads;
    p.num_kv_heads = num_kv_heads;
    p.q_len = p.kv_len = length;
    p.head_dim = p.v_head_dim = 128;
    p.dtype = DType::kBFloat16;
    p.scale = 1;
    p.query = p.key = p.value = p.out = memory;
    p.query_strides = p.key_strides = p.value_strides = {0, length * 128, 128, 1};
    AttentionBackwardParams bp{p};
    bp.grad_out = bp.grad_query = bp.grad_key = bp.grad_value = memory;
    bp.grad_out_strides = bp.grad_query_strides = bp.grad_key_strides = bp.grad_value_strides = p.query_strides;
    const BackwardPlan plan = plan_backward(bp, num_heads / num_kv_heads, {132, 227 * 1024, sm90});
    CHECK(plan.sm90 == sm90);
    return plan;
  };
  // By arithmetic, for 132 places. 32 blocks of 128 keys with 128 steps each: 4 parts. 64 blocks of 16 steps: 2 parts,
  // of keys and of rows. 512 blocks: none.
  const BackwardPlan few_heads = plan_of(8, 2, 2048, true), brief = plan_of(8, 8, 1024, true);
  CHECK(few_heads.of_keys.parts == 4);
  CHECK(few_heads.of_keys.blocks == 128);
  CHECK(few_heads.of_rows.parts == 1);
  CHECK(few_heads.workspace_bytes == int64_t{2} * 4 * 2048 * (128 + 128) * 4);
  CHECK(brief.of_keys.parts == 2);
  CHECK(brief.of_rows.parts == 2);
  CHECK(plan_of(32, 8, 8192, true).workspace_bytes == 0);
  // Blocks of 64 owners, of which 264 run at once.
  CHECK(plan_of(8, 2, 2048, false).of_keys.parts == 4);
  CHECK(plan_of(32, 8, 8192, false).workspace_bytes == 0);
}

TEST_CASE("the parts of a tile's others are whole steps and cover each once") {
  int64_t wrong = 0;
  for (const int64_t begin : {0, 5, 64, 130})
    for (const int64_t length : {0, 1, 64, 65, 300, 1000})
      for (const int64_t step : {16, 64})
        for (int64_t parts = 1; parts <= 7; ++parts) {
          const Range others = length ? Range{begin, begin + length} : Range{0, 0};
          const int64_t first = others.begin / step * step;
          std::vector<int> seen(others.end);
          for (int64_t part = 0; part < parts; ++part) {
            const Range mine = others_of_part(others, first, step, parts, part);
            if (mine.begin > others.begin) wrong += (mine.begin - first) % step != 0;
            for (int64_t other = mine.begin; other < mine.end; ++other) ++seen[other];
          }
          for (int64_t other = 0; other < others.end; ++other) wrong += seen[other] != (other >= others.begin);
        }
  CHECK(wrong == 0);
}

TEST_CASE("each block has a tile of its own, and the longest ones of a section's heads come first") {
  for (const int64_t heads : {1, 2, 5, 8})
    for (const int64_t tiles : {1, 3, 7})
      for (int64_t section = 1; section <= heads; ++section) {
        std::set<std::pair<int64_t, int64_t>> seen;
        int64_t wrong = 0, first = 0, tile = 0;
        for (int64_t block = 0; block < heads * tiles; ++block) {
          const BlockPlace at = place_of_block(block, heads, tiles, section);
          seen.insert({at.head, at.tile});
          wrong += at.head < 0 || at.head >= heads || at.tile < 0 || at.tile >= tiles;
          if (at.head / section != first / section) first = at.head, tile = 0;
          wrong += at.head / section < first / section || at.tile < tile;
          tile = at.tile;
        }
        CHECK(wrong == 0);
        CHECK(static_cast<int64_t>(seen.size()) == heads * tiles);
      }
  CHECK(heads_of_section(true, 64, 4 << 20) == 8);
  CHECK(heads_of_section(true, 3, 4 << 20) == 3);
  CHECK(heads_of_section(true, 3, 100 << 20) == 1);
  CHECK(heads_of_section(true, 3, 0) == 3);
  CHECK(heads_of_section(false, 64, 4 << 20) == 1);
  CHECK(heads_of_section(true, 0, 1) == 1);
}

TEST_CASE("units give every pair of a row and a key that it sees to one block") {
  std::mt19937 random(5);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 200; ++round) {
    AttentionParams p{};
    p.batch = draw(1, 2);
    p.num_kv_heads = draw(1, 3);
    const int64_t group = draw(1, 5);
    p.num_heads = p.num_kv_heads * group;
    p.q_len = draw(1, 40);
    p.kv_len = draw(1, 700);
    p.head_dim = p.v_head_dim = 64;
    p.dtype = DType::kFloat32;
    p.causal = draw(0, 1);
    p.q_offset = draw(-10, 700);
    p.window_left = draw(0, 2) ? -1 : draw(0, 50);
    p.window_right = draw(0, 2) ? -1 : draw(0, 50);
    std::vector<int64_t> lens(p.batch, draw(0, p.kv_len));
    if (draw(0, 1)) p.kv_lens = lens.data();
    const ForwardPlan plan = plan_forward(p, group, {draw(1, 40), 200000});
    std::vector<int> seen(p.batch * p.num_kv_heads * plan.rows * p.kv_len);
    int64_t wrong = 0;
    for (int64_t block = 0; block < plan.blocks; ++block) {
      const Unit u = unit_of(p, plan, block);
      const int64_t valid = p.kv_lens ? lens[u.b] : p.kv_len;  // the memory after these keys may not be ours
      wrong += u.keys.begin < 0 || u.keys.end > valid;
      wrong += u.keys.begin >= u.keys.end && u.keys.end > 0;  // a beginning rounded down would find keys
      for (int64_t r = u.first; r < u.first + plan.tile_rows && r < plan.rows; ++r) {
        const Row row = make_row(p, u.b, u.kv_head, r);
        for (int64_t key = u.keys.begin; key < u.keys.end; ++key)
          if (key >= row.begin && key < row.end)
            ++seen[((u.b * p.num_kv_heads + u.kv_head) * plan.rows + r) * p.kv_len + key];
      }
    }
    for (int64_t h = 0; h < p.batch * p.num_kv_heads; ++h)
      for (int64_t r = 0; r < plan.rows; ++r)
        for (int64_t key = 0; key < p.kv_len; ++key) {
          const int64_t b = h / p.num_kv_heads, position = r / group + p.q_offset;
          const bool sees = key < (p.kv_lens ? lens[b] : p.kv_len) && (!p.causal || key <= position) &&
                            (p.window_left < 0 || key >= position - p.window_left) &&
                            (p.window_right < 0 || key <= position + p.window_right);
          wrong += seen[(h * plan.rows + r) * p.kv_len + key] != sees;
        }
    CHECK(wrong == 0);
  }
}

TEST_CASE("the keys of some rows, and the rows of some keys, are those of each of them") {
  std::mt19937 random(6);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  int64_t wrong = 0, some = 0;
  for (int round = 0; round < 2000; ++round) {
    AttentionParams p{};
    p.batch = p.num_kv_heads = 1;
    p.num_heads = draw(1, 4);
    p.q_len = draw(1, 30);
    p.kv_len = draw(0, 60);
    p.causal = draw(0, 1);
    p.q_offset = draw(-50, 120);
    p.window_left = draw(-1, 20);
    p.window_right = draw(-1, 20);
    const int64_t lens = draw(0, p.kv_len), first = draw(0, p.q_len * p.num_heads), count = draw(1, 40);
    if (draw(0, 1)) p.kv_lens = &lens;
    const Range some_keys{draw(0, 70), draw(0, 70)}, rows = rows_that_see(p, 0, 0, some_keys);
    for (int64_t r = 0; r < p.q_len * p.num_heads; ++r) {
      const Range all = key_range(p, 0, r / p.num_heads), seen = intersection(all, some_keys);
      const bool inside = r >= rows.begin && r < rows.end;
      wrong += inside ? seen.empty() && !all.empty() && !some_keys.empty() : !seen.empty();
    }
    wrong += rows.begin < 0 || rows.end > p.q_len * p.num_heads || rows.begin > rows.end;
    const Range keys = hull(p, 0, 0, first, count);
    wrong += keys.begin < keys.end && (keys.begin < 0 || keys.end > (p.kv_lens ? lens : p.kv_len));
    for (int64_t r = first; r < first + count; ++r) {
      const Row row = make_row(p, 0, 0, r);
      wrong += row.begin < row.end && (row.begin < keys.begin || row.end > keys.end);
      some += row.begin < row.end;
    }
  }
  CHECK(wrong == 0);
  CHECK(some > 1000);
}

namespace {

template <class Tile>
void check_room(ForwardKernel kernel, int64_t width) {
  const int64_t room = shared_bytes(kernel, Tile::kRows, width);
  CHECK(static_cast<int64_t>(sizeof(typename Tile::Shared)) <= room);
  CHECK(room <= 163 * 1024);  // the most that a block of sm_80 may ask for: no device that runs these kernels has less
}

}  // namespace

TEST_CASE("tiles fit the shared memory that the plan counts on") {
  check_room<ForwardTile<BFloat16, 4, 1, 64>>(ForwardKernel::kPrefill, 64);
  check_room<ForwardTile<BFloat16, 4, 1, 64, KeysIn::kTensor, Scores::kPlain>>(ForwardKernel::kPrefill, 64);
  check_room<ForwardTile<BFloat16, 4, 1, 128, KeysIn::kTensor, Scores::kPlain>>(ForwardKernel::kPrefill, 128);
  check_room<ForwardTile<BFloat16, 4, 1, 128>>(ForwardKernel::kPrefill, 128);
  check_room<ForwardTile<BFloat16, 4, 1, 256>>(ForwardKernel::kPrefill, 256);
  check_room<ForwardTile<Float16, 1, 4, 64>>(ForwardKernel::kDecode, 64);
  check_room<ForwardTile<Float16, 1, 4, 128>>(ForwardKernel::kDecode, 128);
  check_room<ForwardTile<Float16, 1, 4, 256>>(ForwardKernel::kDecode, 256);
  check_room<LatentTile<BFloat16, 1, 4>>(ForwardKernel::kLatent, kLatentHeadDim);
  check_room<LatentTile<Float16, 4, 8>>(ForwardKernel::kLatent, kLatentHeadDim);
  CHECK(sizeof(ExactShared<double>) <= 48 * 1024);  // static
  for (int64_t width : {64, 128, 256}) CHECK(backward_shared_bytes(width) <= 163 * 1024);
}

TEST_CASE("what tensor cores cannot take goes to the exact kernel") {
  alignas(16) char memory[16] = {};
  const auto kernel = [&](const auto& change, int64_t shared = 227 * 1024) {
    AttentionParams p{};
    p.batch = 1;
    p.num_heads = p.num_kv_heads = 2;
    p.q_len = 100;
    p.kv_len = 1000;
    p.head_dim = p.v_head_dim = 128;
    p.dtype = DType::kBFloat16;
    p.query = p.key = p.value = memory;
    p.query_strides = p.key_strides = p.value_strides = {2 * 1000 * 128, 1000 * 128, 128, 1};
    change(p);
    AttentionBackwardParams bp{p};
    bp.grad_out = memory;
    bp.grad_out_strides = {0, 0, 128, 1};
    // The gradients take the same kind of kernel, except for a latent.
    const ForwardPlan plan = plan_forward(p, 1, {132, shared});
    const bool exact = plan.kernel == ForwardKernel::kExact;
    CHECK((plan_backward(bp, 1, {132, shared}).width == 0) == (exact || plan.kernel == ForwardKernel::kLatent));
    bp.grad_out = memory + 2;
    CHECK(plan_backward(bp, 1, {132, shared}).width == 0);
    return plan.kernel;
  };
  CHECK(kernel([](auto&) {}) == ForwardKernel::kPrefill);
  CHECK(kernel([](auto& p) { p.q_len = 16; }) == ForwardKernel::kDecode);
  CHECK(kernel([](auto& p) { p.dtype = DType::kFloat32; }) == ForwardKernel::kExact);
  CHECK(kernel([](auto& p) { p.head_dim = 0; }) == ForwardKernel::kExact);
  CHECK(kernel([](auto& p) { p.v_head_dim = 0; }) == ForwardKernel::kExact);
  CHECK(kernel([](auto& p) { p.head_dim = 257; }) == ForwardKernel::kExact);
  CHECK(kernel([](auto& p) { p.v_head_dim = 100; }) == ForwardKernel::kExact);
  CHECK(kernel([](auto& p) { p.query_strides.row = 132; }) == ForwardKernel::kExact);  // rows not at whole chunks
  CHECK(kernel([](auto& p) { p.key_strides.head = 4; }) == ForwardKernel::kExact);
  CHECK(kernel([](auto& p) { p.value_strides.batch = 2; }) == ForwardKernel::kExact);
  CHECK(kernel([&](auto& p) { p.key = memory + 2; }) == ForwardKernel::kExact);
  const auto latent = [](auto& p) {
    p.head_dim = 576;
    p.v_head_dim = 512;
    p.key_strides = p.value_strides = {1000 * 576, 1000 * 576, 576, 1};
  };
  CHECK(kernel(latent) == ForwardKernel::kLatent);
  CHECK(kernel(latent, 99 * 1024) == ForwardKernel::kLatent);  // sm_86, sm_89 and sm_120: fewer rows at once
  CHECK(kernel([&](auto& p) { latent(p), p.dtype = DType::kFloat32; }) == ForwardKernel::kExact);
  CHECK(kernel([&](auto& p) { latent(p), p.value_strides.row = 584; }) == ForwardKernel::kExact);
}

TEST_CASE("devices with little shared memory get smaller tiles, never the exact kernel") {
  constexpr int64_t kLittle = 99 * 1024;  // sm_86, sm_89 and sm_120
  alignas(16) char memory[16] = {};
  for (const auto& [head_dim, v_head_dim] :
       {std::pair<int64_t, int64_t>{64, 64}, {128, 128}, {192, 128}, {256, 256}, {576, 512}})
    for (const int64_t q_len : {1, 16, 17, 300})
      for (const int64_t shared : {kLittle, int64_t{163 * 1024}, int64_t{227 * 1024}}) {
        AttentionParams p{};
        p.batch = p.num_heads = p.num_kv_heads = 1;
        p.q_len = q_len;
        p.kv_len = 1000;
        p.head_dim = head_dim;
        p.v_head_dim = v_head_dim;
        p.dtype = DType::kBFloat16;
        p.query = p.key = p.value = memory;
        p.query_strides = p.key_strides = p.value_strides = {0, 0, head_dim, 1};
        const Device device{132, shared};
        const ForwardPlan plan = plan_forward(p, 1, device);
        CHECK(plan.kernel != ForwardKernel::kExact);
        CHECK(shared_bytes(plan.kernel, plan.tile_rows, plan.width) <= shared);
        AttentionBackwardParams bp{p};
        bp.grad_out = memory;
        if (head_dim <= 256) CHECK(plan_backward(bp, 1, device).width > 0);
      }
}

TEST_CASE("strides of dimensions of size 1 do not matter") {
  alignas(16) char memory[16] = {};
  AttentionParams p{};
  p.batch = p.num_kv_heads = 1;
  p.num_heads = 16;
  p.q_len = 1;
  p.kv_len = 100;
  p.head_dim = 576;
  p.v_head_dim = 512;
  p.dtype = DType::kBFloat16;
  p.query = p.key = p.value = memory;
  p.query_strides = {3, 576, 7, 1};
  p.key_strides = {1, 5, 576, 1};
  p.value_strides = {2, 9, 576, 1};
  CHECK(plan_forward(p, 16, {132, 227 * 1024}).kernel == ForwardKernel::kExact);
  drop_unused_strides(p);
  CHECK(plan_forward(p, 16, {132, 227 * 1024}).kernel == ForwardKernel::kLatent);
  p.batch = 2;
  p.key_strides.batch = 1;
  drop_unused_strides(p);
  CHECK(p.key_strides.batch == 1);
  // The gradient of the output, too.
  p.batch = 1;
  p.head_dim = p.v_head_dim = 64;
  drop_unused_strides(p);
  AttentionBackwardParams bp{p};
  bp.grad_out = memory;
  bp.grad_out_strides = {3, 64, 7, 1};
  CHECK(plan_backward(bp, 16, {132, 227 * 1024}).width == 0);
  drop_unused_strides(bp);
  CHECK(plan_backward(bp, 16, {132, 227 * 1024}).width == 64);
  CHECK(bp.grad_out_strides.head == 64);
}

TEST_CASE("the parts of a sequence share out the keys that it sees") {
  AttentionParams p{};
  p.batch = 3;
  p.num_heads = p.num_kv_heads = 1;
  p.q_len = 1;
  p.kv_len = 128 << 10;
  p.head_dim = p.v_head_dim = 128;
  p.dtype = DType::kFloat32;
  p.window_left = p.window_right = -1;
  const int64_t lens[] = {8192, 128 << 10, 100}, offsets[] = {8191, (128 << 10) - 1, 99};
  p.kv_lens = lens;
  const auto working = [&](int64_t b, const ForwardPlan& plan, int64_t* longest) {
    int64_t parts = 0;
    *longest = 0;
    for (int64_t block = 0; block < plan.blocks; ++block)
      if (const Unit u = unit_of(p, plan, block); u.b == b && u.keys.begin < u.keys.end) {
        ++parts;
        *longest = std::max(*longest, u.keys.end - u.keys.begin);
      }
    return parts;
  };
  int64_t longest;
  ForwardPlan split = plan_forward(p, 1, {1, 227 * 1024});
  split.blocks = split.blocks / split.parts * 29;
  split.parts = 29;
  CHECK(working(0, split, &longest) >= 26);
  CHECK(longest <= 320);
  CHECK(working(1, split, &longest) == 29);
  CHECK(working(2, split, &longest) == 2);
  // A window leaves the last 5000 keys.
  p.kv_lens = nullptr;
  p.q_offsets = offsets;
  p.causal = true;
  p.window_left = 4999;
  CHECK(working(1, split, &longest) >= 26);
}

TEST_CASE("kernels run where the driver is new enough and the build has an image for the device") {
  struct Machine {
    int driver = 13000, runtime = 13000, capability = 9;
    bool image = true;
    int* asked = nullptr;
    int driver_version() const { return driver; }
    int runtime_version() const { return runtime; }
    int major(int) const { return capability; }
    bool has_image(int device) const {
      if (asked) ++*asked;
      return image && device != 1;
    }
  };
  const auto runs = [](Machine machine) { return can_run_on(machine, 0); };
  CHECK(runs({}));
  CHECK(runs({.driver = 13020}));
  CHECK(!runs({.driver = 12080}));
  CHECK(!runs({.driver = 0}));
  CHECK(!runs({.capability = 7}));
  CHECK(!runs({.image = false}));
  int asked = 0;
  Usable<Machine> usable(Machine{.asked = &asked});
  for (int i = 0; i < 3; ++i) {
    CHECK(usable(0));
    CHECK(!usable(1));
    CHECK(!usable(-1));
  }
  CHECK(asked == 2);
}

TEST_CASE("partial results of all parts and rows lie apart, within the workspace") {
  AttentionParams p{};
  p.batch = 2;
  p.num_kv_heads = 3;
  p.num_heads = 6;
  p.q_len = 2;
  p.kv_len = 2000;
  p.head_dim = p.v_head_dim = 24;
  p.dtype = DType::kFloat32;
  const ForwardPlan plan = plan_forward(p, 2, {132, 227 * 1024});
  REQUIRE(plan.parts > 1);
  std::set<float*> places;
  float* const base = nullptr;
  for (int64_t head = 0; head < p.batch * p.num_kv_heads; ++head)
    for (int64_t part = 0; part < plan.parts; ++part)
      for (int64_t row = 0; row < plan.rows; ++row) places.insert(partial_row<float>(p, plan, base, head, part, row));
  CHECK(static_cast<int64_t>(places.size()) == p.batch * p.num_kv_heads * plan.parts * plan.rows);
  float* last = *places.begin();
  int64_t overlaps = 0;
  for (float* place : places) {
    overlaps += place != *places.begin() && place - last < p.v_head_dim + 2;
    last = place;
  }
  CHECK(overlaps == 0);
  CHECK((last - base + p.v_head_dim + 2) * 4 == plan.workspace_bytes);
}

TEST_CASE("softmax parts merge the same in any grouping") {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0, 5);
  for (int round = 0; round < 100; ++round) {
    Softmax<double> part[3];
    double value[3];
    for (int i = 0; i < 3; ++i) {
      part[i] = round % 7 == i ? Softmax<double>{-infinity<double>(), 0} : Softmax<double>{normal(random), 1 + i * 0.5};
      value[i] = part[i].sum * normal(random);
    }
    const auto join = [](Softmax<double> a, double x, Softmax<double> b, double y) {
      double left, right;
      const Softmax<double> both = merge(a, b, &left, &right);
      return std::pair(both, x * left + y * right);
    };
    const auto [ab, x] = join(part[0], value[0], part[1], value[1]);
    const auto [abc, y] = join(ab, x, part[2], value[2]);
    const auto [bc, z] = join(part[1], value[1], part[2], value[2]);
    const auto [other, w] = join(part[0], value[0], bc, z);
    CHECK(abc.max == other.max);
    CHECK(std::abs(abc.sum - other.sum) < 1e-12 * abc.sum);
    CHECK(std::abs(y - w) < 1e-12 * (1 + std::abs(y)));
  }
}

TEST_CASE("16-bit numbers round as they should") {
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0, 100);
  for (int i = 0; i < 1000; ++i) {
    const float x = normal(random);
    BFloat16 b;
    Float16 h;
    narrow(x, &b);
    narrow(x, &h);
    CHECK(std::abs(widen(b) - x) <= std::abs(x) * 0x1p-8f);
    CHECK(std::abs(widen(h) - x) <= std::abs(x) * 0x1p-11f + 0x1p-25f);
  }
  BFloat16 b;
  narrow(std::nanf(""), &b);
  CHECK(std::isnan(widen(b)));
  narrow(infinity<float>(), &b);
  CHECK(widen(b) == infinity<float>());
}
