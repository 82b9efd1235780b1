#pragma once

#include <attnpack/ops/cuda/kernels/index.h>
#include <attnpack/ops/cuda/kernels/device.cuh>
#include <attnpack/ops/cuda/kernels/exact.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>

// Parts of all tensor-core kernels: tiles of 16-bit rows in swizzled shared memory, the steps of keys through them, and
// a lane's two rows of scores.
namespace attnpack::cuda {

// The weight of a score is 2^(log2(e) * (score - max)). The maximum is subtracted first: where a mask holds fp32's
// smallest number, the product with log2(e) would leave fp32.
constexpr float kLog2E = 1.4426950408889634f;

// Copies rows [0, count) of `width` numbers into a tile [Rows, Width]. The rest of the tile becomes zeros. row(i): the
// i-th row.
template <int Rows, int Width, int Threads, class S, class GetRow>
ATTNPACK_DEVICE void copy_tile(S* tile, const GetRow& row, int count, int width, const S* somewhere) {
  constexpr int kChunks = Width / 8, kCopies = Rows * kChunks / Threads;
  static_assert(Rows * kChunks % Threads == 0);
  if constexpr (Threads % (8 * kChunks) == 0) {
    // A thread has the same chunk of every (Threads / kChunks)-th row, and the swizzle of these rows is the same. So a
    // whole tile takes few instructions per copy.
    if (count >= Rows && width == Width) {
      const int first = thread_id() / kChunks, chunk = thread_id() % kChunks;
      S* to = tile + swizzled_offset(first, chunk, Width);
#pragma unroll 4
      for (int i = 0; i < kCopies; ++i)
        copy_async(to + i * Threads * 8, row(first + i * (Threads / kChunks)) + chunk * 8, 16);
      return;
    }
  }
#pragma unroll 4
  for (int i = 0; i < kCopies; ++i) {
    const int n = i * Threads + thread_id(), r = n / kChunks, chunk = n % kChunks;
    const bool valid = r < count && chunk * 8 < width;
    copy_async(tile + swizzled_offset(r, chunk, Width), valid ? row(r) + chunk * 8 : somewhere, valid ? 16 : 0);
  }
}

// Calls attend(count, cleaned) for the unit's `count` rows; it returns whether this thread wrote NaN or Inf. If any
// thread did, attend runs again with the values cleaned of them (write_tile says why).
template <int Rows, class Attend>
ATTNPACK_DEVICE void attend_rows(const AttentionParams& p, const Unit& u, const Attend& attend) {
  const int64_t left = count_head_rows(p, u.sequence, u.kv_head) - u.first;
  if (left <= 0) return;
  const int count = static_cast<int>(left < Rows ? left : Rows);
  bool cleaned = false;
  while (any_in_block(attend(count, cleaned)) && !cleaned) cleaned = true;
}

// Copies the unit's first `count` query rows into a tile [Rows, Width]. The copy is part of the next commit.
template <int Rows, int Width, int Threads, class S>
ATTNPACK_DEVICE void copy_query(S* tile, const AttentionParams& p, const Unit& u, int count) {
  const S* base = static_cast<const S*>(p.query) + u.b * p.query_strides.batch +
                  queries_of(p, u.sequence).begin * p.query_strides.row;
  const int64_t group = group_size(p, u.kv_head);
  const auto row = [&](int r) {
    const int64_t index = u.first + r;
    return base + group_head(p, u.kv_head, index % group) * p.query_strides.head + index / group * p.query_strides.row;
  };
  copy_tile<Rows, Width, Threads>(tile, row, count, static_cast<int>(p.head_dim), base);
}

// Goes through keys, or rows, in steps of `Step`, in two stages: while use(begin, stage) works on one step, load(begin,
// stage) of the next is under way. Steps begin at multiples of Step, so that a part's sums are the same whatever its
// tile sees.
template <int Step, class Load, class Use>
ATTNPACK_DEVICE void stream_steps(const Range& range, const Load& load, const Use& use) {
  int64_t begin = range.begin / Step * Step;
  if (begin < range.end) load(begin, 0);
  copy_async_commit();
  for (int stage = 0; begin < range.end; begin += Step, stage ^= 1) {
    if (begin + Step < range.end) load(begin + Step, stage ^ 1);
    copy_async_commit();
    copy_async_wait<1>();
    sync_block();
    use(begin, stage);
    sync_block();
  }
  copy_async_wait<0>();
  sync_block();
}

// As stream_steps, with one stage for the keys and one for the values: while use_keys works, the values of its step are
// under way, and while use_values works, the keys of the next step. So a block needs half of the shared memory. Keys
// are counted in 32 bits, as in Row, because registers are short here.
template <int Step, class LoadKeys, class UseKeys, class LoadValues, class UseValues>
ATTNPACK_DEVICE void stream_halves(const Range& range, const LoadKeys& load_keys, const UseKeys& use_keys,
                                   const LoadValues& load_values, const UseValues& use_values) {
  const int32_t end = static_cast<int32_t>(range.end);
  int32_t begin = static_cast<int32_t>(range.begin / Step * Step);
  if (begin < end) load_keys(begin);
  copy_async_commit();
  for (; begin < end; begin += Step) {
    copy_async_wait<0>();
    sync_block();
    load_values(begin);
    copy_async_commit();
    use_keys(begin);
    copy_async_wait<0>();
    sync_block();
    if (begin + Step < end) load_keys(begin + Step);
    copy_async_commit();
    use_values(begin);
  }
  copy_async_wait<0>();
  sync_block();
}

// A lane's rows: lane / 4 and lane / 4 + 8 of 16. They stay in the block's table, because most steps need none of them.
struct LaneRows {
  const Row* first;
  // The keys in the ranges of both rows; the mask may exclude some of them. Blocks inside need no comparison.
  int32_t begin, end;
  ATTNPACK_DEVICE Row row(int h) const { return first[8 * h]; }
};

// table: the 16 rows.
ATTNPACK_DEVICE LaneRows lane_rows_of(const Row* table) {
  const Row* first = table + thread_id() % kWarp / 4;
  return {first, first[0].begin > first[8].begin ? first[0].begin : first[8].begin,
          first[0].end < first[8].end ? first[0].end : first[8].end};
}

// cap tanh(x) = cap - 2 cap / (1 + e^2x), for scores that become weights of 16 bits. It has a third of tanh's
// instructions. Its error is 3e-7 of the cap.
struct CoarseCap {
  float exponent, cap;
  ATTNPACK_DEVICE explicit CoarseCap(const ScoreRule<float>& rule)
      : exponent(2 * kLog2E * rule.into_cap), cap(rule.cap) {}
  ATTNPACK_DEVICE float operator()(float product) const { return cap - 2 * cap * share(product); }
  // d(capped) / d(scaled), 1 - tanh^2.
  ATTNPACK_DEVICE float slope(float product) const {
    const float x = share(product);
    return 4 * x * (1 - x);
  }
  // (1 - tanh) / 2.
  ATTNPACK_DEVICE float share(float product) const { return reciprocal(1 + power_of_two(product * exponent)); }
};

template <class M>
struct alignas(2 * sizeof(M)) MaskPair {
  M numbers[2];
};
// Adds a mask to the scores of a lane. Where all keys are in both rows' ranges, and the mask's rows lie so, neighbours
// are read at once.
template <int Blocks>
ATTNPACK_DEVICE void apply_mask(const AttentionParams& p, const LaneRows& rows, const Row (&row)[2],
                                const RowRule<float> (&of_row)[2], int64_t begin, float (&s)[Blocks][4]) {
  const int64_t step = p.mask_strides.column, first = begin + place_in_c(thread_id() % kWarp, 0).column;
  const auto apply = [](float& x, MaskValue<float> mask) { x = mask.excludes ? -infinity<float>() : x + mask.value; };
  with_mask_type(p.mask_dtype, [&](auto type) {
    using M = decltype(type);
    const M* at[2];  // the first key's number
#pragma unroll
    for (int h = 0; h < 2; ++h) at[h] = static_cast<const M*>(p.mask) + of_row[h].mask + first * step;
    const bool in_pairs =
        (reinterpret_cast<uintptr_t>(at[0]) | reinterpret_cast<uintptr_t>(at[1])) % sizeof(MaskPair<M>) == 0;
    if (step == 1 && in_pairs && begin >= rows.begin && begin + 8 * Blocks <= rows.end) {
#pragma unroll
      for (int j = 0; j < Blocks; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const auto pair = *reinterpret_cast<const MaskPair<M>*>(at[h] + 8 * j);
          apply(s[j][2 * h], mask_value<float>(pair.numbers[0]));
          apply(s[j][2 * h + 1], mask_value<float>(pair.numbers[1]));
        }
      return;
    }
#pragma unroll
    for (int j = 0; j < Blocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i >> 1, further = 8 * j + (i & 1);
        if (first + further < row[h].begin || first + further >= row[h].end) continue;  // the mask may not be there
        apply(s[j][i], mask_value<float>(at[h][further * step]));
      }
  });
}

// The parts of finish_score that need more than a row's range, for all scores of a lane. Each question about the
// settings is asked once for all of them, because a score has time for few instructions.
template <int Blocks>
ATTNPACK_DEVICE void apply_score_rules(const AttentionParams& p, int64_t b, const LaneRows& rows, int64_t begin,
                                       float (&s)[Blocks][4]) {
  const int column = place_in_c(thread_id() % kWarp, 0).column;
  const ScoreRule<float> rule = score_rule<float>(p);
  const auto for_each = [&](const auto& change) {
#pragma unroll
    for (int j = 0; j < Blocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) change(s[j][i], i >> 1, 8 * j + column + (i & 1));  // score, row, key from begin
  };
  if (p.softcap > 0) {
    const CoarseCap capped(rule);
    for_each([&](float& x, int, int) { x = capped(x); });
  } else {
    for_each([&](float& x, int, int) { x *= rule.scale; });
  }
  const Row row[2] = {rows.row(0), rows.row(1)};
  const RowRule<float> of_row[2] = {row_rule<float>(p, b, row[0]), row_rule<float>(p, b, row[1])};
  if (p.alibi_slopes) {
    const int64_t far[2] = {row[0].position - begin, row[1].position - begin};
    constexpr int64_t kNear = int64_t{1} << 30;
    if (far[0] > -kNear && far[1] > -kNear && far[0] < kNear && far[1] < kNear) {
      const int32_t near[2] = {static_cast<int32_t>(far[0]), static_cast<int32_t>(far[1])};
      for_each([&](float& x, int h, int key) {
        const int32_t distance = near[h] < key ? key - near[h] : near[h] - key;
        x -= of_row[h].slope * static_cast<float>(distance);
      });
    } else {
      for_each([&](float& x, int h, int key) {
        const int64_t distance = far[h] < key ? key - far[h] : far[h] - key;
        x -= of_row[h].slope * static_cast<float>(distance);
      });
    }
  }
  if (p.mask) apply_mask(p, rows, row, of_row, begin, s);
}

// Which calls a kernel takes. The rules of a score need registers that sums could have, so calls without any have
// kernels of their own.
enum class Scores { kAny, kPlain, kMasked };  // kPlain: is_plain; kMasked: is_masked, by bits (mask_bits.cuh)

// Turns products into scores without the factor `multiplier`; excluded keys become -inf. s: `Blocks` fragments of 8
// keys from `begin` on.
template <Scores Kind = Scores::kAny, int Blocks>
ATTNPACK_DEVICE void finish_scores(const AttentionParams& p, int64_t b, const LaneRows& rows, int64_t begin,
                                   float (&s)[Blocks][4]) {
  if constexpr (Kind == Scores::kAny)
    if (!only_scaled(p)) apply_score_rules(p, b, rows, begin, s);
  const int32_t first = static_cast<int32_t>(begin) + place_in_c(thread_id() % kWarp, 0).column;
  if (begin >= rows.begin && begin + 8 * Blocks <= rows.end) return;
  const Row row[2] = {rows.row(0), rows.row(1)};
#pragma unroll
  for (int j = 0; j < Blocks; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t key = first + 8 * j + (i & 1);
      s[j][i] = key >= row[i >> 1].begin && key < row[i >> 1].end ? s[j][i] : -infinity<float>();
    }
}

// The maximum, and the sum, over the four lanes that hold one row of a fragment.
ATTNPACK_DEVICE float row_max(float x) {
  x = larger(x, shuffle_xor(x, 1));
  return larger(x, shuffle_xor(x, 2));
}
ATTNPACK_DEVICE float row_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

template <Scores Kind = Scores::kAny>
ATTNPACK_DEVICE float multiplier_of(const AttentionParams& p) {
  return Kind != Scores::kAny || only_scaled(p) ? static_cast<float>(p.scale) * kLog2E : kLog2E;
}
// The maximum of a row, or 0 where all its keys are excluded: any finite number would do.
ATTNPACK_DEVICE float finite_max(float max) { return max == -infinity<float>() ? 0.f : max; }

// Turns finished scores of a lane's row h into weights that count from its new maximum `top`, and updates max and sum.
// Returns the factor of the output so far. The sum is this lane's part: the row's four lanes are added up at the end.
template <Scores Kind, int Blocks>
ATTNPACK_DEVICE float raise_row(float multiplier, float (&s)[Blocks][4], int h, float top, float& max, float& sum) {
  const float base = finite_max(top);
  const float factor = top == max ? 1.f : power_of_two((max - base) * multiplier);
  max = top;
  float more = 0;
#pragma unroll
  for (int j = 0; j < Blocks; ++j)
#pragma unroll
    for (int i = 2 * h; i < 2 * h + 2; ++i) {
      s[j][i] =
          power_of_two(Kind != Scores::kAny ? s[j][i] * multiplier - base * multiplier : (s[j][i] - base) * multiplier);
      more += s[j][i];
    }
  sum = sum * factor + more;
  return factor;
}
// Turns finished scores of a lane's rows into weights, and updates the rows' maxima and sums (the online softmax).
// factor: what the output so far is to be multiplied with.
template <Scores Kind, int Blocks>
ATTNPACK_DEVICE void raise_softmax(const AttentionParams& p, float (&s)[Blocks][4], float (&max)[2], float (&sum)[2],
                                   float (&factor)[2]) {
  const float multiplier = multiplier_of<Kind>(p);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = max[h];
#pragma unroll
    for (int j = 0; j < Blocks; ++j) top = larger(top, larger(s[j][2 * h], s[j][2 * h + 1]));
    factor[h] = raise_row<Kind>(multiplier, s, h, row_max(top), max[h], sum[h]);
  }
}

// Dropout on the weights of a lane's rows.
template <int Blocks>
ATTNPACK_DEVICE void drop_weights(const AttentionParams& p, int64_t b, const LaneRows& rows, int64_t begin,
                                  float (&s)[Blocks][4]) {
  const int column = place_in_c(thread_id() % kWarp, 0).column;
  const float kept = static_cast<float>(p.kept_factor);
  const uint64_t seed = seed_of(p);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Row row = rows.row(h);
    const uint64_t place = first_place(p, b, row.head, row.query) + begin + column;
#pragma unroll
    for (int j = 0; j < Blocks; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) s[j][2 * h + i] *= dropped_at(p, seed, place + 8 * j + i) ? 0.f : kept;
  }
}

// Sets NaN and Inf to 0. The order of the numbers does not matter.
template <int Count, int Threads, class S>
ATTNPACK_DEVICE void clean_tile(S* tile) {
  for (int i = thread_id(); i < Count; i += Threads)
    if (!is_finite(widen(tile[i]))) narrow(0.f, tile + i);
}

}  // namespace attnpack::cuda
