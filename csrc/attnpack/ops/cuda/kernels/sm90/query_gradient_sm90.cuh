#pragma once

#include <attnpack/ops/cuda/kernels/sm90/backward_sm90.cuh>
#include <attnpack/ops/cuda/kernels/sm90/pair_rules_sm90.cuh>

namespace attnpack::cuda {

// dQ += dS K for 128 rows of a kv head, over the keys that they see.
template <class S, int Width, int Values, Scores Kind>
class WarpgroupQueryGradient : WarpgroupBackward<S, Width, Values, kBackwardStepSm90> {
  using Base = WarpgroupBackward<S, Width, Values, kBackwardStepSm90>;
  using Base::kStages, Base::kBoth, Base::kWorkers, Base::kPairBytes;
  using typename Base::Products, typename Base::Weights;

 public:
  using Base::kThreads, Base::kOwners, Base::kStep;
  struct Shared : Base::Shared {
    Row rows[kOwners];
    ListedStep listed[kStages];  // under a mask: of the keys that are there
    int32_t steps;               // not in registers, as in key_gradient_sm90.cuh
  };

  ATTNPACK_DEVICE WarpgroupQueryGradient(const AttentionBackwardParams& bp, const BackwardPlan& plan,
                                         const TileMap& key_map, const TileMap& value_map, void* workspace,
                                         int64_t block, Shared& shared)
      : bp_(bp),
        p_(bp.forward),
        plan_(plan),
        workspace_(workspace),
        key_map_(key_map),
        value_map_(value_map),
        shared_(shared),
        lane_(thread_id() % kWarp),
        group_(thread_id() / kWarpgroup) {
    const OwnersPlace at = place_of_owners(p_, plan, Gradient::kQuery, kOwners, block);
    b_ = at.batch;
    kv_head_ = at.kv_head;
    part_ = at.part;
    first_ = at.first;
    sequence_ = at.sequence;
    const int64_t left = count_head_rows(p_, sequence_, kv_head_) - first_;
    count_ = left < kOwners ? static_cast<int>(left) : kOwners;
    keys_ = hull(p_, sequence_, kv_head_, first_, kOwners);
    int32_t steps;
    if constexpr (kMasked) {
      listed_ = steps_of_keys(plan.lists_of_rows, workspace, b_, kv_head_, first_ / kOwners, keys_);
      listed_ = Base::steps_of_part(listed_, plan.of_rows.parts, part_);
      steps = listed_.count;
    } else {
      keys_ = others_of_part(keys_, keys_.begin, kStep, plan.of_rows.parts, part_);
      first_key_ = static_cast<int32_t>(keys_.begin);
      steps = (static_cast<int32_t>(keys_.end) - first_key_ + kStep - 1) / kStep;
    }
    if (thread_id() == 0) shared.steps = steps;
  }

  ATTNPACK_DEVICE void compute_gradients() {
    if (count_ <= 0) return;
    Base::set_up_barriers(shared_, 1);
    fill_rows(p_, sequence_, kv_head_, first_, kOwners, shared_.rows);
    run_roles<kWorkers>(
        shared_.broken, [&](int turn) { load_steps(turn * steps()); },
        [&](int turn) { return gather(turn * steps(), turn == 1); });
  }

 private:
  static constexpr bool kMasked = Kind == Scores::kMasked;

  ATTNPACK_DEVICE void load_steps(int done) {
    if (thread_id() != kWorkers) return;
    const int before = static_cast<int>(keys_of(p_, sequence_).begin);
    for (int i = 0; i < steps(); ++i) {
      const int n = done + i, stage = n % kStages;
      wait(shared_.used[stage], (n / kStages & 1) ^ 1);
      if constexpr (kMasked) shared_.listed[stage] = listed_[i];
      const int key = before + step_of(i, stage).first_key;
      arrive_expecting(shared_.there[stage], kPairBytes);
      copy_boxes<kStep, Width>(shared_.others[stage].of_scores, key_map_, shared_.there[stage], key,
                               place_in_map(p_.key_strides.head, kv_head_), place_in_map(p_.key_strides.batch, b_));
      copy_boxes<kStep, Values>(shared_.others[stage].of_values, value_map_, shared_.there[stage], key,
                                place_in_map(p_.value_strides.head, kv_head_),
                                place_in_map(p_.value_strides.batch, b_));
    }
  }

  // As in the forward kernel.
  struct Step {
    int32_t first_key;
    bool hides;
  };
  ATTNPACK_DEVICE Step step_of(int i, int stage) const {
    if constexpr (kMasked) return {shared_.listed[stage].step() * kStep, shared_.listed[stage].hides()};
    return {first_key_ + i * kStep, false};
  }
  using Bits = MaskWords<kStep / 32>;
  ATTNPACK_DEVICE void load_bits(const Step& step, Bits (&bits)[2]) const {
    if constexpr (kMasked)
      if (step.hides) load_mask(plan_.mask, workspace_, mask_, step.first_key, bits);
  }

  // Returns whether this thread wrote NaN or Inf.
  ATTNPACK_DEVICE bool gather(int done, bool cleaned) {
    const auto rows_of = [&](const void* base, const Strides& strides) {
      return query_rows<S>(base, strides, b_, shared_.rows);
    };
    const S* somewhere = static_cast<const S*>(p_.query);
    copy_panels<kOwners, Width, kWorkers>(shared_.owners.of_scores, rows_of(p_.query, p_.query_strides), count_,
                                          p_.head_dim, somewhere);
    copy_panels<kOwners, Values, kWorkers>(shared_.owners.of_values, rows_of(bp_.grad_out, bp_.grad_out_strides),
                                           count_, p_.v_head_dim, somewhere);
    copy_async_commit();
    const LaneRows rows = lane_rows_of(shared_.rows + first_row());
    if constexpr (kMasked) mask_.find(plan_.mask, b_, rows);
    float lse[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Row row = rows.row(h);
      const int64_t at = (b_ * p_.num_heads + row.head) * p_.q_len + row.query;
      lse[h] = static_cast<const float*>(p_.lse)[at] * (Kind == Scores::kAny ? 1.f : kLog2E);
      delta[h] = static_cast<const float*>(bp_.delta)[at];
    }
    copy_async_wait<0>();
    fence_stores();
    sync_threads(kBoth, kWorkers);

    clear(sum_);
    if (cleaned)
      sum_cleaned(rows, lse, delta, done);
    else if (steps() > 0)
      sum_steps(rows, lse, delta, done);
    return write(cleaned);
  }

  ATTNPACK_DEVICE int32_t steps() const { return shared_.steps; }
  ATTNPACK_DEVICE int first_row() const { return 16 * (thread_id() / kWarp); }

  // Begins the two products that a step's weights need.
  ATTNPACK_DEVICE void begin_products(int stage, Products& s, Products& g) {
    begin_scores<S, kOwners, kStep, Width, (Width > 128)>(s, shared_.owners.of_scores, 64 * group_,
                                                          shared_.others[stage].of_scores);
    begin_scores<S, kOwners, kStep, Values>(g, shared_.owners.of_values, 64 * group_, shared_.others[stage].of_values);
  }

  // The sum of a step runs beside the weights of the next one.
  ATTNPACK_DEVICE void sum_steps(const LaneRows& rows, const float (&lse)[2], const float (&delta)[2], int done) {
    Products s, g;
    Weights weights;
    Bits bits[2];
    wait(shared_.there[done % kStages], done / kStages & 1);
    Step step = step_of(0, done % kStages);
    begin_products(done % kStages, s, g);
    load_bits(step, bits);
    wait_products<0>();
    hold(s);
    hold(g);
    compute_weights(rows, step, bits, lse, delta, s, g);
    for (int i = 1; i < steps(); ++i) {
      const int n = done + i, stage = n % kStages, before = (n - 1) % kStages;
      end_sum(n - 2, i > 1, g, weights);
      wait(shared_.there[stage], n / kStages & 1);
      step = step_of(i, stage);
      begin_products(stage, s, g);
      begin_sum<S, kStep>(sum_, weights, shared_.others[before].of_scores);
      load_bits(step, bits);
      wait_products<1>();
      hold(s);
      hold(g);
      compute_weights(rows, step, bits, lse, delta, s, g);
    }
    end_sum(done + steps() - 2, steps() > 1, g, weights);
    const int last = (done + steps() - 1) % kStages;
    clear_last_keys(last, kMasked ? step.first_key : first_key_ + (steps() - 1) * kStep);
    begin_sum<S, kStep>(sum_, weights, shared_.others[last].of_scores);
    wait_products<0>();
    hold(sum_);
    Base::release(shared_.used[last]);
  }
  // As end_values of the forward kernel.
  ATTNPACK_DEVICE void end_sum(int n, bool some, const Products& g, Weights& weights) {
    wait_products<0>();
    hold(sum_);
    hold(weights);
    if (some) Base::release(shared_.used[n % kStages]);
    pack_weights<S>(g, weights);
  }
  // One after the other, because the keys are cleaned between the products of a step.
  ATTNPACK_DEVICE void sum_cleaned(const LaneRows& rows, const float (&lse)[2], const float (&delta)[2], int done) {
    for (int i = 0; i < steps(); ++i) {
      const int n = done + i, stage = n % kStages;
      Products s, g;
      Weights weights;
      Bits bits[2];
      wait(shared_.there[stage], n / kStages & 1);
      const Step step = step_of(i, stage);
      begin_products(stage, s, g);
      load_bits(step, bits);
      wait_products<0>();
      hold(s);
      hold(g);
      compute_weights(rows, step, bits, lse, delta, s, g);
      pack_weights<S>(g, weights);
      Base::clean_others(shared_, stage);
      begin_sum<S, kStep>(sum_, weights, shared_.others[stage].of_scores);
      wait_products<0>();
      hold(sum_);
      Base::release(shared_.used[stage]);
    }
  }

  // g = dS / scale = P (dP - delta).
  ATTNPACK_DEVICE void compute_weights(const LaneRows& rows, const Step& step, const Bits (&bits)[2],
                                       const float (&lse)[2], const float (&delta)[2], Products& s, Products& g) {
    if constexpr (Kind == Scores::kAny) return weigh_rows_by_rules(p_, b_, rows, step.first_key, lse, delta, s, g);
    if constexpr (kMasked)
      if (step.hides) hide_scores(bits, s);
    finish_scores<Kind>(p_, b_, rows, step.first_key, s);
    const float multiplier = multiplier_of<Kind>(p_);
    const auto set_weights = [&](const auto& bounded) {
#pragma unroll
      for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float gradient = power_of_two(bounded(s[j][i] * multiplier - lse[i / 2])) * (g[j][i] - delta[i / 2]);
          g[j][i] = s[j][i] == -infinity<float>() ? 0.f : gradient;
        }
    };
    if (is_huge(lse[0]) || is_huge(lse[1]))
      set_weights([](float x) { return bounded_exponent(x); });
    else
      set_weights([](float x) { return x; });
  }

  // Keys past the last one may be anything: their weights are 0, but 0 * NaN is not.
  ATTNPACK_DEVICE void clear_last_keys(int stage, int32_t first_key) {
    const int left = static_cast<int32_t>(keys_.end) - first_key;
    if (left >= kStep) return;
    sync_threads(kBoth, kWorkers);
    clear_rows<kStep, Width, kWorkers>(shared_.others[stage].of_scores, left);
    fence_stores();
    sync_threads(kBoth, kWorkers);
  }

  ATTNPACK_DEVICE bool write(bool cleaned) {
    if (plan_.of_rows.parts > 1) {
      const OwnersPlace at{b_, kv_head_, part_, first_, sequence_};
      return write_to(partial_rows(p_, plan_, Gradient::kQuery, workspace_, at), cleaned);
    }
    const auto rows = query_rows<S>(bp_.grad_query, bp_.grad_query_strides, b_, shared_.rows);
    return write_to([&](int owner) { return const_cast<S*>(rows(owner)); }, cleaned);
  }
  template <class To>
  ATTNPACK_DEVICE bool write_to(const To& to, bool cleaned) {
    const float scale = static_cast<float>(p_.scale);
    if (cleaned) {
      sync_threads(kBoth, kWorkers);
      put_fragments<Base::kScoreStride>(shared_.score_sum, sum_, first_row(), scale);
      Base::template write_cleaned<Base::kScoreStride>(
          shared_.score_sum, count_, p_.head_dim, keys_, to,
          KeyNumber<S>{key_rows<S>(p_.key, p_.key_strides, b_, kv_head_, keys_of(p_, sequence_).begin)},
          RowSeesKey{&p_, b_, shared_.rows});
      return false;
    }
    bool broken = false;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (const int r = first_row() + lane_ / 4 + 8 * h; r < count_)
        broken |= write_lane_row(sum_, h, scale, to(r), p_.head_dim);
    return broken;
  }

  const AttentionBackwardParams& bp_;
  const AttentionParams& p_;
  const BackwardPlan& plan_;
  void* const workspace_;
  const TileMap &key_map_, &value_map_;
  Shared& shared_;
  const int lane_, group_;
  int count_;
  int32_t b_, kv_head_, part_, sequence_;
  int64_t first_;
  Range keys_;
  ListedSteps listed_;
  LaneMask mask_;
  int32_t first_key_;
  float sum_[Width / 8][4];
};

template <class S, int Width, int Values, Scores Kind>
ATTNPACK_DEVICE void query_gradient_sm90_block(const AttentionBackwardParams& bp, const BackwardPlan& plan,
                                               const TileMap& key_map, const TileMap& value_map, void* workspace,
                                               int64_t block, void* shared) {
  using Tile = WarpgroupQueryGradient<S, Width, Values, Kind>;
  Tile(bp, plan, key_map, value_map, workspace, block, *static_cast<typename Tile::Shared*>(shared))
      .compute_gradients();
}

}  // namespace attnpack::cuda
