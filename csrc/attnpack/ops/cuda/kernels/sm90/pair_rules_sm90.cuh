#pragma once

#include <attnpack/ops/cuda/kernels/tiles.cuh>

// The weights of pairs in Hopper's gradients, for scores with rules: cap, ALiBi, masks of any type, dropout. s comes in
// as products of queries and keys, g as dP. g becomes dS / scale = P (kept dP - delta) slope, where `kept` is dropout's
// factor and `slope` that of the cap. Excluded pairs become zeros, whatever their products are. lse is natural. As in
// tiles.cuh, each question about the settings is asked once for all pairs.
namespace attnpack::cuda {

// P of a score that may be excluded.
ATTNPACK_DEVICE float probability_of(float score, float lse) {
  return score == -infinity<float>() ? 0.f : power_of_two(bounded_exponent(score - lse) * kLog2E);
}

// A lane has two rows, and the keys of each fragment from `begin` on.
template <int Blocks>
ATTNPACK_DEVICE void weigh_rows_by_rules(const AttentionParams& p, int64_t b, const LaneRows& rows, int32_t begin,
                                         const float (&lse)[2], const float (&delta)[2], float (&s)[Blocks][4],
                                         float (&g)[Blocks][4]) {
  const auto for_each = [&](const auto& change) {
#pragma unroll
    for (int j = 0; j < Blocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) change(s[j][i], g[j][i], i / 2);
  };
  if (p.dropout_p > 0) drop_weights(p, b, rows, begin, g);
  for_each([&](float&, float& y, int h) { y -= delta[h]; });
  if (p.softcap > 0) {
    const CoarseCap capped(score_rule<float>(p));
    for_each([&](float& x, float& y, int) { y *= capped.slope(x); });
  }
  finish_scores<Scores::kAny>(p, b, rows, begin, s);
  const float scale = only_scaled(p) ? static_cast<float>(p.scale) : 1.f;
  for_each(
      [&](float& x, float& y, int h) { y = x == -infinity<float>() ? 0.f : probability_of(x * scale, lse[h]) * y; });
}

// The rows of a step that a lane of the key's gradient has are of one query head, from `query` on.
struct StepOfRows {
  int64_t b, head, query;
};
// The mask of scores that the ranges leave. key: the lane's first; its second is 8 further on.
template <int Blocks>
ATTNPACK_DEVICE void apply_mask_to_keys(const AttentionParams& p, const StepOfRows& at, int32_t key,
                                        float (&s)[Blocks][4]) {
  const Strides& strides = p.mask_strides;
  const int64_t query = at.query + thread_id() % 4 * 2,
                first = at.b * strides.batch + at.head * strides.head + query * strides.row + key * strides.column;
  with_mask_type(p.mask_dtype, [&](auto type) {
    using M = decltype(type);
    const M* numbers = static_cast<const M*>(p.mask) + first;
#pragma unroll
    for (int j = 0; j < Blocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[j][i];
        if (x == -infinity<float>()) continue;  // the mask may not be there
        const MaskValue<float> mask =
            mask_value<float>(numbers[(8 * j + (i & 1)) * strides.row + (i >> 1) * 8 * strides.column]);
        x = mask.excludes ? -infinity<float>() : x + mask.value;
      }
  });
}
// A lane has the keys `key` and `key` + 8, and the rows of each fragment. s becomes P with dropout. rows: their lse,
// delta and ranges.
template <class Rows, int Blocks>
ATTNPACK_DEVICE void weigh_keys_by_rules(const AttentionParams& p, const StepOfRows& at, int32_t key, const Rows& rows,
                                         float (&s)[Blocks][4], float (&g)[Blocks][4]) {
  static_assert(4 * Blocks <= 32);
  const auto for_each = [&](const auto& change) {  // score, dP, row, key, number of the pair
#pragma unroll
    for (int j = 0; j < Blocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        change(s[j][i], g[j][i], 8 * j + thread_id() % 4 * 2 + (i & 1), key + (i >> 1) * 8, 4 * j + i);
  };
  uint32_t dropped = 0;  // a bit for each pair
  const float kept = p.dropout_p > 0 ? static_cast<float>(p.kept_factor) : 1.f;
  if (p.dropout_p > 0) {
    const uint64_t seed = seed_of(p), place = first_place(p, at.b, at.head, at.query);
    for_each([&](float&, float& y, int row, int32_t key, int pair) {
      const bool drops = dropped_at(p, seed, place + static_cast<uint64_t>(row) * p.kv_len + key);
      dropped |= static_cast<uint32_t>(drops) << pair;
      y *= drops ? 0.f : kept;
    });
  }
  for_each([&](float&, float& y, int row, int32_t, int) { y -= rows.delta[row]; });
  const ScoreRule<float> rule = score_rule<float>(p);
  if (p.softcap > 0) {
    const CoarseCap capped(rule);
    for_each([&](float& x, float& y, int, int32_t, int) {
      y *= capped.slope(x);
      x = capped(x);
    });
  } else {
    for_each([&](float& x, float&, int, int32_t, int) { x *= rule.scale; });
  }
  if (p.alibi_slopes) {
    const float slope = static_cast<float>(p.alibi_slopes[at.head]);
    const int64_t position = at.query + first_position(p, at.b);
    for_each([&](float& x, float&, int row, int32_t key, int) {
      const int64_t distance = position + row < key ? key - position - row : position + row - key;
      x -= slope * static_cast<float>(distance);
    });
  }
  for_each([&](float& x, float&, int row, int32_t key, int) {
    if (key < rows.begin[row] || key >= rows.end[row]) x = -infinity<float>();
  });
  if (p.mask) apply_mask_to_keys(p, at, key, s);
  for_each([&](float& x, float& y, int row, int32_t, int pair) {
    const float probability = probability_of(x, rows.lse[row]);
    y = x == -infinity<float>() ? 0.f : probability * y;
    x = dropped >> pair & 1 ? 0.f : probability * kept;
  });
}

}  // namespace attnpack::cuda
