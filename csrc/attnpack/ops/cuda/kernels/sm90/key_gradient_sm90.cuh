#pragma once

#include <attnpack/ops/cuda/kernels/sm90/backward_sm90.cuh>
#include <attnpack/ops/cuda/kernels/sm90/pair_rules_sm90.cuh>

namespace attnpack::cuda {

// Row j of a block's steps, which go through one query head after the other, as a row of the kv head.
struct RowOfSteps {
  int32_t first_query, rows_of_head, members;
  ATTNPACK_DEVICE int64_t operator()(int64_t j) const {
    const int32_t row = static_cast<int32_t>(j), member = row / rows_of_head;
    return int64_t{first_query + row - member * rows_of_head} * members + member;
  }
};
// RowNumber and KeySeenByRow for such rows. A step may go past the last row.
template <class S>
struct NumberOfSteps {
  RowOfSteps row;
  RowNumber<S> number;
  int64_t rows;  // of the kv head
  ATTNPACK_DEVICE float operator()(int64_t j, int c) const {
    const int64_t index = row(j);
    return index < rows ? number(index, c) : 0.f;
  }
};
struct SeenInSteps {
  RowOfSteps row;
  KeySeenByRow seen;
  ATTNPACK_DEVICE Row prepare(int64_t j) const { return seen.prepare(row(j)); }
  ATTNPACK_DEVICE bool operator()(int owner, const Row& row) const { return seen(owner, row); }
};

// dK += dS^T Q and dV += P^T dO for 128 keys, over the query heads of their kv head one after the other, and the rows
// of each that see any of the keys.
template <class S, int Width, int Values, Scores Kind>
class WarpgroupKeyGradient : WarpgroupBackward<S, Width, Values, backward_rows_sm90(Width)> {
  using Base = WarpgroupBackward<S, Width, Values, backward_rows_sm90(Width)>;
  using Base::kStages, Base::kBoth, Base::kWorkers, Base::kPairBytes;
  using typename Base::Products, typename Base::Weights;
  static constexpr bool kMasked = Kind == Scores::kMasked;

 public:
  using Base::kThreads, Base::kOwners, Base::kStep;
  static constexpr int kWords = kOwners / 32;  // of the mask, for a row and the block's keys
  // The query rows of a step. In arrays, because ptxas would load a row at once, and spill what is needed later.
  struct Others {
    float lse[kStep], delta[kStep];
    int32_t begin[kStep], end[kStep];  // the keys that each sees
    uint32_t bits[kMasked ? kWords : 1][kMasked ? kStep : 1];
  };
  // A block's place and its steps. They lie in shared memory, because registers are short beside the two sums.
  struct Work {
    OwnersPlace at;
    int32_t count, members;  // keys, and query heads
    // The sequence: its valid keys, its number of queries, the position of the first one, and where its rows and keys
    // begin.
    int32_t valid, queries, query_place, key_place;
    int64_t position;
    int32_t first_query, steps_of_head, first_step, steps;
    const int32_t* listed;  // under a mask: its steps, of all rows
  };
  struct Shared : Base::Shared {
    alignas(16) Others rows[kStages];
    bool huge[kStages], hides[kStages];     // whether any of a step's rows has a huge lse, and any pair is hidden
    int32_t head[kStages], query[kStages];  // with rules: of a step's first row
    Work work;
  };

  ATTNPACK_DEVICE WarpgroupKeyGradient(const AttentionBackwardParams& bp, const BackwardPlan& plan,
                                       const TileMap& key_map, const TileMap& value_map, const TileMap& query_map,
                                       const TileMap& out_map, void* workspace, int64_t block, Shared& shared)
      : bp_(bp),
        p_(bp.forward),
        plan_(plan),
        workspace_(workspace),
        key_map_(key_map),
        value_map_(value_map),
        query_map_(query_map),
        out_map_(out_map),
        shared_(shared),
        lane_(thread_id() % kWarp),
        group_(thread_id() / kWarpgroup) {
    if (thread_id() == 0) shared.work = find_work(block);
  }

  ATTNPACK_DEVICE void compute_gradients() {
    Base::set_up_barriers(shared_, 1 + kWarp);
    sync_block();
    run_roles<kWorkers>(
        shared_.broken,
        [&](int turn) {
          load_steps(turn);
          fill_tables(turn * work().steps);
        },
        [&](int turn) { return gather(turn, turn == 1); });
  }

 private:
  ATTNPACK_DEVICE Work find_work(int64_t block) const {
    Work work{place_of_owners(p_, plan_, Gradient::kKeyAndValue, kOwners, block)};
    const OwnersPlace& at = work.at;
    const Range queries = queries_of(p_, at.sequence), keys = keys_of(p_, at.sequence);
    const int64_t left = keys.count() - at.first;
    work.count = static_cast<int32_t>(left < kOwners ? left : kOwners);
    work.valid = static_cast<int32_t>(valid_keys(p_, at.sequence));
    work.queries = static_cast<int32_t>(queries.count());
    work.query_place = static_cast<int32_t>(queries.begin);
    work.key_place = static_cast<int32_t>(keys.begin);
    work.position = first_position(p_, at.sequence);
    work.members = static_cast<int32_t>(group_size(p_, at.kv_head));
    if constexpr (kMasked) {
      const ListedSteps mine =
          Base::steps_of_part(steps_of_rows(plan_.lists_of_keys, workspace_, at.batch, at.kv_head, at.first / kOwners),
                              plan_.of_keys.parts, at.part);
      work.steps_of_head = static_cast<int32_t>((p_.q_len + kStep - 1) / kStep);
      work.steps = mine.count;
      work.listed = mine.numbers;
      return work;
    }
    const Range rows = rows_that_see(p_, at.sequence, at.kv_head, {at.first, at.first + kOwners});
    work.first_query = work.members > 0 ? static_cast<int32_t>(rows.begin / work.members) : 0;
    const int32_t end = work.members > 0 ? static_cast<int32_t>(rows.end / work.members) : 0;
    work.steps_of_head = (end - work.first_query + kStep - 1) / kStep;
    const Range steps = others_of_part({0, work.steps_of_head * work.members}, 0, 1, plan_.of_keys.parts, at.part);
    work.first_step = static_cast<int32_t>(steps.begin);
    work.steps = static_cast<int32_t>(steps.end - steps.begin);
    return work;
  }
  ATTNPACK_DEVICE const Work& work() const { return shared_.work; }
  // The number of a step among those of all members.
  ATTNPACK_DEVICE int32_t number_of_step(int i) const {
    if constexpr (kMasked) return ListedStep{work().listed[i]}.step();
    return work().first_step + i;
  }
  ATTNPACK_DEVICE int64_t head_of_step(int i) const {
    return group_head(p_, work().at.kv_head, number_of_step(i) / work().steps_of_head);
  }
  ATTNPACK_DEVICE int32_t query_of_step(int i) const {
    return work().first_query + number_of_step(i) % work().steps_of_head * kStep;
  }

  ATTNPACK_DEVICE void load_steps(int turn) {
    if (thread_id() != kWorkers) return;
    const OwnersPlace& at = work().at;
    const int steps = work().steps, first = work().key_place + static_cast<int>(at.first);
    arrive_expecting(shared_.owners_there, kOwners * (Width + Values) * 2);
    copy_boxes<kOwners, Width>(shared_.owners.of_scores, key_map_, shared_.owners_there, first,
                               place_in_map(p_.key_strides.head, at.kv_head),
                               place_in_map(p_.key_strides.batch, at.batch));
    copy_boxes<kOwners, Values>(shared_.owners.of_values, value_map_, shared_.owners_there, first,
                                place_in_map(p_.value_strides.head, at.kv_head),
                                place_in_map(p_.value_strides.batch, at.batch));
    for (int i = 0; i < steps; ++i) {
      const int n = turn * steps + i, stage = n % kStages, query = work().query_place + query_of_step(i);
      const int64_t head = head_of_step(i);
      wait(shared_.used[stage], (n / kStages & 1) ^ 1);
      arrive_expecting(shared_.there[stage], kPairBytes);
      copy_boxes<kStep, Width>(shared_.others[stage].of_scores, query_map_, shared_.there[stage], query,
                               place_in_map(p_.query_strides.head, head),
                               place_in_map(p_.query_strides.batch, at.batch));
      copy_boxes<kStep, Values>(shared_.others[stage].of_values, out_map_, shared_.there[stage], query,
                                place_in_map(bp_.grad_out_strides.head, head),
                                place_in_map(bp_.grad_out_strides.batch, at.batch));
    }
  }

  // A warp of its own, of which all lanes arrive: sanitizers follow only threads that do. Rows past the last one see no
  // key.
  ATTNPACK_DEVICE void fill_tables(int done) {
    if (thread_id() / kWarp != kWorkers / kWarp + 1) return;
    const int64_t b = work().at.batch;
    const int steps = work().steps;
    for (int i = 0; i < steps; ++i) {
      const int n = done + i, stage = n % kStages;
      const int64_t head = head_of_step(i);
      const bool hides = kMasked && ListedStep{work().listed[i]}.hides();
      wait(shared_.used[stage], (n / kStages & 1) ^ 1);
      bool huge = false;
      for (int r = lane_; r < kStep; r += kWarp) {
        const int64_t query = query_of_step(i) + r,
                      at = (b * p_.num_heads + head) * p_.q_len + work().query_place + query;
        const bool there = query < work().queries;
        const float lse = there ? static_cast<const float*>(p_.lse)[at] * (Kind == Scores::kAny ? 1.f : kLog2E) : 0.f;
        const Range keys = there ? keys_at(p_, work().position + query, work().valid) : Range{0, 0};
        const bool some = keys.begin < keys.end;
        Others& rows = shared_.rows[stage];
        rows.lse[r] = lse;
        rows.delta[r] = there ? static_cast<const float*>(bp_.delta)[at] : 0.f;
        rows.begin[r] = some ? static_cast<int32_t>(keys.begin) : 0;
        rows.end[r] = some ? static_cast<int32_t>(keys.end) : 0;
        huge |= is_huge(lse);
        if constexpr (kMasked)
          if (hides && there) {
            const uint32_t* bits = mask_row(plan_.mask, workspace_, b, head, query) + work().at.first / 32;
            const auto words = *reinterpret_cast<const MaskWords<kWords>*>(bits);
            for (int w = 0; w < kWords; ++w) rows.bits[w][r] = words.word[w];
          }
      }
      huge = ballot(huge) != 0;
      if (lane_ == 0) {
        shared_.huge[stage] = huge;
        if constexpr (kMasked) shared_.hides[stage] = hides;
        if constexpr (Kind == Scores::kAny) {
          shared_.head[stage] = static_cast<int32_t>(head);
          shared_.query[stage] = query_of_step(i);
        }
      }
      arrive(shared_.there[stage]);
    }
  }

  // Returns whether this thread wrote NaN or Inf.
  ATTNPACK_DEVICE bool gather(int turn, bool cleaned) {
    clear(key_sum_);
    clear(value_sum_);
    wait(shared_.owners_there, turn & 1);
    const int steps = work().steps;
    for (int i = 0; i < steps; ++i) {
      const int n = turn * steps + i, stage = n % kStages;
      Products s, g;
      Weights weights, gradients;
      wait(shared_.there[stage], n / kStages & 1);
      begin_scores<S, kOwners, kStep, Width, (Width > 128)>(s, shared_.owners.of_scores, 64 * group_,
                                                            shared_.others[stage].of_scores);
      begin_scores<S, kOwners, kStep, Values>(g, shared_.owners.of_values, 64 * group_,
                                              shared_.others[stage].of_values);
      if constexpr (Kind == Scores::kAny) {
        wait_products<0>();
        hold(s);
        hold(g);
        weigh_keys_by_rules(p_, {work().at.sequence, shared_.head[stage], shared_.query[stage]},
                            static_cast<int32_t>(work().at.first) + first_owner() + lane_ / 4, shared_.rows[stage], s,
                            g);
        pack_weights<S>(s, weights);
        pack_weights<S>(g, gradients);
        if (cleaned) Base::clean_others(shared_, stage);
        begin_sum<S, kStep>(value_sum_, weights, shared_.others[stage].of_values);
        begin_sum<S, kStep>(key_sum_, gradients, shared_.others[stage].of_scores);
        end_step(stage, weights, gradients);
        continue;
      }
      wait_products<1>();
      hold(s);
      const Others& rows = shared_.rows[stage];
      compute_probabilities(rows, shared_.huge[stage], kMasked && shared_.hides[stage], s);
      pack_weights<S>(s, weights);
      if (cleaned) {
        wait_products<0>();
        Base::clean_others(shared_, stage);
      }
      begin_sum<S, kStep>(value_sum_, weights, shared_.others[stage].of_values);
      wait_products<1>();
      hold(g);
      compute_gradients_of_scores(rows, s, g);
      pack_weights<S>(g, gradients);
      begin_sum<S, kStep>(key_sum_, gradients, shared_.others[stage].of_scores);
      end_step(stage, weights, gradients);
    }
    return write(cleaned);
  }
  ATTNPACK_DEVICE void end_step(int stage, Weights& weights, Weights& gradients) {
    wait_products<0>();
    hold(key_sum_);
    hold(value_sum_);
    hold(weights);
    hold(gradients);
    Base::release(shared_.used[stage]);
  }

  ATTNPACK_DEVICE int first_owner() const { return 16 * (thread_id() / kWarp); }

  // s: keys by rows. Excluded pairs become -0, the mark of excluded pairs, whatever their products are. Each question
  // is asked once for all scores, because a score has time for few instructions.
  ATTNPACK_DEVICE void compute_probabilities(const Others& rows, bool huge, bool hides, Products& s) {
    const float multiplier = multiplier_of<Kind>(p_);
    // The ranges of later rows never begin or end earlier. A row past the last one ends at 0.
    const int32_t first = static_cast<int32_t>(work().at.first), end = first + kOwners;
    const bool inside = rows.end[0] >= end && rows.end[kStep - 1] >= end && rows.begin[kStep - 1] <= first;
    const int32_t key = first + first_owner() + lane_ / 4;
    const auto for_each = [&](const auto& change) {
#pragma unroll
      for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) change(s[j][i], 8 * j + lane_ % 4 * 2 + (i & 1), key + (i >> 1) * 8);
    };
    for_each([&](float& x, int row, int32_t) { x = x * multiplier - rows.lse[row]; });
    if (huge) for_each([](float& x, int, int32_t) { x = bounded_exponent(x); });
    for_each([](float& x, int, int32_t) { x = power_of_two(x); });
    if (!inside)
      for_each([&](float& x, int row, int32_t key) { x = key >= rows.begin[row] && key < rows.end[row] ? x : -0.f; });
    if constexpr (kMasked)
      if (hides) {
        const auto& bits = rows.bits[first_owner() / 32];
        const int bit = first_owner() % 32 + lane_ / 4;
        for_each([&](float& x, int row, int32_t own) { x = bits[row] >> (bit + own - key) & 1 ? x : -0.f; });
      }
  }
  // g = dS / scale = P (dP - delta).
  ATTNPACK_DEVICE void compute_gradients_of_scores(const Others& rows, const Products& s, Products& g) {
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float gradient = s[j][i] * (g[j][i] - rows.delta[8 * j + lane_ % 4 * 2 + (i & 1)]);
        g[j][i] = float_bits(s[j][i]) == 0x80000000u ? 0.f : gradient;
      }
  }

  ATTNPACK_DEVICE bool write(bool cleaned) {
    if (plan_.of_keys.parts > 1) {
      const auto rows = [&](int64_t column) {
        return partial_rows(p_, plan_, Gradient::kKeyAndValue, workspace_, work().at, column);
      };
      return write_to(rows(0), rows(p_.head_dim), cleaned);
    }
    const OwnersPlace at = work().at;
    const auto rows = [&](void* base, const Strides& strides) {
      const KeyRows<S> rows = key_rows<S>(base, strides, at.batch, at.kv_head, work().key_place + at.first);
      return [rows](int owner) { return const_cast<S*>(rows(owner)); };
    };
    return write_to(rows(bp_.grad_key, bp_.grad_key_strides), rows(bp_.grad_value, bp_.grad_value_strides), cleaned);
  }
  template <class ToKey, class ToValue>
  ATTNPACK_DEVICE bool write_to(const ToKey& key_row, const ToValue& value_row, bool cleaned) {
    const float scale = static_cast<float>(p_.scale);
    if (cleaned) {
      const Work assigned = work();
      const OwnersPlace& at = assigned.at;
      const RowOfSteps row{assigned.first_query, assigned.steps_of_head * kStep, assigned.members};
      // The parts of a list may add NaN and Inf of one row each, which changes nothing.
      const int32_t steps = kMasked ? assigned.members * assigned.steps_of_head : assigned.steps;
      const Range rows{int64_t{assigned.first_step} * kStep, int64_t{assigned.first_step + steps} * kStep};
      const auto number = [&](const void* base, const Strides& strides, bool as_nan) {
        const S* first = static_cast<const S*>(base) + at.batch * strides.batch + assigned.query_place * strides.row;
        return NumberOfSteps<S>{
            row, {&p_, first, strides, at.kv_head, as_nan}, int64_t{assigned.members} * assigned.queries};
      };
      const SeenInSteps seen{row, {&p_, at.sequence, at.kv_head, at.first}};
      sync_threads(kBoth, kWorkers);
      put_fragments<Base::kScoreStride>(shared_.score_sum, key_sum_, first_owner(), scale);
      put_fragments<Base::kValueStride>(shared_.value_sum, value_sum_, first_owner());
      Base::template write_cleaned<Base::kScoreStride>(shared_.score_sum, assigned.count, p_.head_dim, rows, key_row,
                                                       number(p_.query, p_.query_strides, true), seen);
      Base::template write_cleaned<Base::kValueStride>(shared_.value_sum, assigned.count, p_.v_head_dim, rows,
                                                       value_row, number(bp_.grad_out, bp_.grad_out_strides, false),
                                                       seen);
      return false;
    }
    const int count = work().count;
    bool broken = false;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (const int r = first_owner() + lane_ / 4 + 8 * h; r < count) {
        broken |= write_lane_row(key_sum_, h, scale, key_row(r), p_.head_dim);
        broken |= write_lane_row(value_sum_, h, 1.f, value_row(r), p_.v_head_dim);
      }
    return broken;
  }

  const AttentionBackwardParams& bp_;
  const AttentionParams& p_;
  const BackwardPlan& plan_;
  void* const workspace_;
  const TileMap &key_map_, &value_map_, &query_map_, &out_map_;
  Shared& shared_;
  const int lane_, group_;
  float key_sum_[Width / 8][4], value_sum_[Values / 8][4];
};

template <class S, int Width, int Values, Scores Kind>
ATTNPACK_DEVICE void key_gradient_sm90_block(const AttentionBackwardParams& bp, const BackwardPlan& plan,
                                             const TileMap& key_map, const TileMap& value_map, const TileMap& query_map,
                                             const TileMap& out_map, void* workspace, int64_t block, void* shared) {
  using Tile = WarpgroupKeyGradient<S, Width, Values, Kind>;
  Tile(bp, plan, key_map, value_map, query_map, out_map, workspace, block, *static_cast<typename Tile::Shared*>(shared))
      .compute_gradients();
}

}  // namespace attnpack::cuda
