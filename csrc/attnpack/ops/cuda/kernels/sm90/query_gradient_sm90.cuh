#pragma once

#include <attnpack/ops/cuda/kernels/sm90/backward_sm90.cuh>

namespace attnpack::cuda {

// dQ += dS K for 128 rows of a kv head, over the keys that they see.
template <class S, int Width>
class WarpgroupQueryGradient : WarpgroupBackward<S, Width> {
  using Base = WarpgroupBackward<S, Width>;
  using Base::kStages, Base::kBoth, Base::kWorkers, Base::kPairBytes;
  using typename Base::Products, typename Base::Sums, typename Base::Weights;

 public:
  using Base::kThreads, Base::kOwners, Base::kStep;
  struct Shared : Base::Shared {
    Row rows[kOwners];
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
    const int64_t left = group_size(p_, kv_head_) * p_.q_len - first_;
    count_ = left < kOwners ? static_cast<int>(left) : kOwners;
    keys_ = hull(p_, b_, kv_head_, first_, kOwners);
    keys_ = others_of_part(keys_, keys_.begin, kStep, plan.of_rows.parts, part_);
    first_key_ = static_cast<int32_t>(keys_.begin);
    steps_ = (static_cast<int32_t>(keys_.end) - first_key_ + kStep - 1) / kStep;
  }

  ATTNPACK_DEVICE void compute_gradients() {
    if (count_ <= 0) return;
    Base::set_up_barriers(shared_, 1);
    fill_rows(p_, b_, kv_head_, first_, kOwners, shared_.rows);
    run_roles<kWorkers>(
        shared_.broken, [&](int turn) { load_steps(turn * steps_); },
        [&](int turn) { return gather(turn * steps_, turn == 1); });
  }

 private:
  ATTNPACK_DEVICE void load_steps(int done) {
    if (thread_id() != kWorkers) return;
    for (int i = 0; i < steps_; ++i) {
      const int n = done + i, stage = n % kStages, key = first_key_ + i * kStep;
      wait(shared_.used[stage], (n / kStages & 1) ^ 1);
      arrive_expecting(shared_.there[stage], kPairBytes);
      copy_boxes<kStep, Width>(shared_.other[stage][0], key_map_, shared_.there[stage], key,
                               place_in_map(p_.key_strides.head, kv_head_), place_in_map(p_.key_strides.batch, b_));
      copy_boxes<kStep, Width>(shared_.other[stage][1], value_map_, shared_.there[stage], key,
                               place_in_map(p_.value_strides.head, kv_head_), place_in_map(p_.value_strides.batch, b_));
    }
  }

  // Returns whether this thread wrote NaN or Inf.
  ATTNPACK_DEVICE bool gather(int done, bool cleaned) {
    const auto rows_of = [&](const void* base, const Strides& strides) {
      return query_rows<S>(base, strides, b_, shared_.rows);
    };
    const S* somewhere = static_cast<const S*>(p_.query);
    copy_panels<kOwners, Width, kWorkers>(shared_.owner[0], rows_of(p_.query, p_.query_strides), count_, p_.head_dim,
                                          somewhere);
    copy_panels<kOwners, Width, kWorkers>(shared_.owner[1], rows_of(bp_.grad_out, bp_.grad_out_strides), count_,
                                          p_.v_head_dim, somewhere);
    copy_async_commit();
    const LaneRows rows = lane_rows_of(shared_.rows + first_row());
    float lse[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Row row = rows.row(h);
      const int64_t at = (b_ * p_.num_heads + row.head) * p_.q_len + row.query;
      lse[h] = static_cast<const float*>(p_.lse)[at] * kLog2E;
      delta[h] = static_cast<const float*>(bp_.delta)[at];
    }
    copy_async_wait<0>();
    fence_stores();
    sync_threads(kBoth, kWorkers);

    clear(sum_);
    if (cleaned)
      sum_cleaned(rows, lse, delta, done);
    else if (steps_ > 0)
      sum_steps(rows, lse, delta, done);
    return write(cleaned);
  }

  ATTNPACK_DEVICE int first_row() const { return 16 * (thread_id() / kWarp); }

  // Begins the two products that a step's weights need.
  ATTNPACK_DEVICE void begin_products(int stage, Products& s, Products& g) {
    begin_scores<S, kOwners, kStep, Width>(s, shared_.owner[0], 64 * group_, shared_.other[stage][0]);
    begin_scores<S, kOwners, kStep, Width>(g, shared_.owner[1], 64 * group_, shared_.other[stage][1]);
  }

  // The sum of a step runs beside the weights of the next one.
  ATTNPACK_DEVICE void sum_steps(const LaneRows& rows, const float (&lse)[2], const float (&delta)[2], int done) {
    Products s, g;
    Weights weights;
    wait(shared_.there[done % kStages], done / kStages & 1);
    begin_products(done % kStages, s, g);
    wait_products<0>();
    hold(s);
    hold(g);
    compute_weights(rows, first_key_, lse, delta, s, g);
    for (int i = 1; i < steps_; ++i) {
      const int n = done + i, stage = n % kStages, before = (n - 1) % kStages;
      end_sum(n - 2, i > 1, g, weights);
      wait(shared_.there[stage], n / kStages & 1);
      begin_products(stage, s, g);
      begin_sum<S, kStep>(sum_, weights, shared_.other[before][0]);
      wait_products<1>();
      hold(s);
      hold(g);
      compute_weights(rows, first_key_ + i * kStep, lse, delta, s, g);
    }
    end_sum(done + steps_ - 2, steps_ > 1, g, weights);
    const int last = (done + steps_ - 1) % kStages;
    clear_last_keys(last);
    begin_sum<S, kStep>(sum_, weights, shared_.other[last][0]);
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
    for (int i = 0; i < steps_; ++i) {
      const int n = done + i, stage = n % kStages;
      Products s, g;
      Weights weights;
      wait(shared_.there[stage], n / kStages & 1);
      begin_products(stage, s, g);
      wait_products<0>();
      hold(s);
      hold(g);
      compute_weights(rows, first_key_ + i * kStep, lse, delta, s, g);
      pack_weights<S>(g, weights);
      Base::clean_others(shared_, stage);
      begin_sum<S, kStep>(sum_, weights, shared_.other[stage][0]);
      wait_products<0>();
      hold(sum_);
      Base::release(shared_.used[stage]);
    }
  }

  // g = dS / scale = P (dP - delta).
  ATTNPACK_DEVICE void compute_weights(const LaneRows& rows, int32_t begin, const float (&lse)[2],
                                       const float (&delta)[2], Products& s, Products& g) {
    finish_scores<Scores::kPlain>(p_, b_, rows, begin, s);
    const float multiplier = multiplier_of<Scores::kPlain>(p_);
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
  ATTNPACK_DEVICE void clear_last_keys(int stage) {
    const int left = static_cast<int32_t>(keys_.end) - (first_key_ + (steps_ - 1) * kStep);
    if (left >= kStep) return;
    sync_threads(kBoth, kWorkers);
    clear_rows<kStep, Width, kWorkers>(shared_.other[stage][0], left);
    fence_stores();
    sync_threads(kBoth, kWorkers);
  }

  ATTNPACK_DEVICE bool write(bool cleaned) {
    if (plan_.of_rows.parts > 1) {
      const OwnersPlace at{static_cast<int32_t>(b_), static_cast<int32_t>(kv_head_), part_, first_};
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
      put_fragments<Base::kSumStride>(shared_.sum[0], sum_, first_row(), scale);
      Base::write_cleaned(shared_.sum[0], count_, p_.head_dim, keys_, to,
                          KeyNumber<S>{key_rows<S>(p_.key, p_.key_strides, b_, kv_head_, 0)},
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
  int32_t part_;
  int64_t b_, kv_head_, first_;
  Range keys_;
  int32_t first_key_, steps_;
  Sums sum_;
};

template <class S, int Width>
ATTNPACK_DEVICE void query_gradient_sm90_block(const AttentionBackwardParams& bp, const BackwardPlan& plan,
                                               const TileMap& key_map, const TileMap& value_map, void* workspace,
                                               int64_t block, void* shared) {
  using Tile = WarpgroupQueryGradient<S, Width>;
  Tile(bp, plan, key_map, value_map, workspace, block, *static_cast<typename Tile::Shared*>(shared))
      .compute_gradients();
}

}  // namespace attnpack::cuda
