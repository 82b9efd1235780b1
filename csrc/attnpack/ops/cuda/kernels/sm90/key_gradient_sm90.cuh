#pragma once

#include <attnpack/ops/cuda/kernels/sm90/backward_sm90.cuh>

namespace attnpack::cuda {

// dK += dS^T Q and dV += P^T dO for 128 keys, over the query heads of their kv head one after the other, and the rows
// of each that see any of the keys.
template <class S, int Width>
class WarpgroupKeyGradient : WarpgroupBackward<S, Width> {
  using Base = WarpgroupBackward<S, Width>;
  using Base::kStages, Base::kBoth, Base::kWorkers, Base::kPairBytes;
  using typename Base::Products, typename Base::Sums, typename Base::Weights;

 public:
  using Base::kThreads, Base::kOwners, Base::kStep;
  struct Other {  // a query row
    float lse, delta;
    int32_t begin, end;  // the keys that it sees
  };
  struct Shared : Base::Shared {
    alignas(16) Other rows[kStages][kStep];
    bool huge[kStages];  // whether any of a step's rows has a huge lse
  };

  ATTNPACK_DEVICE WarpgroupKeyGradient(const AttentionBackwardParams& bp, const BackwardPlan& plan,
                                       const TileMap& key_map, const TileMap& value_map, const TileMap& query_map,
                                       const TileMap& out_map, int64_t block, Shared& shared)
      : bp_(bp),
        p_(bp.forward),
        key_map_(key_map),
        value_map_(value_map),
        query_map_(query_map),
        out_map_(out_map),
        shared_(shared),
        lane_(thread_id() % kWarp),
        group_(thread_id() / kWarpgroup) {
    const int64_t tiles = backward_tiles_sm90(p_, plan, Gradient::kKeyAndValue);
    const OwnersPlace at = place_of_owners(p_, plan, Gradient::kKeyAndValue, tiles, kOwners, block);
    b_ = at.batch;
    kv_head_ = at.kv_head;
    first_ = at.first;
    count_ = static_cast<int>(p_.kv_len - first_ < kOwners ? p_.kv_len - first_ : kOwners);
    rows_ = rows_that_see(p_, b_, kv_head_, {first_, first_ + kOwners});
    members_ = static_cast<int>(group_size(p_, kv_head_));
    first_query_ = members_ > 0 ? static_cast<int32_t>(rows_.begin / members_) : 0;
    const int32_t end = members_ > 0 ? static_cast<int32_t>(rows_.end / members_) : 0;
    steps_of_head_ = (end - first_query_ + kStep - 1) / kStep;
    steps_ = steps_of_head_ * members_;
  }

  ATTNPACK_DEVICE void compute_gradients() {
    Base::set_up_barriers(shared_, 1 + kWarp);
    sync_block();
    run_roles<kWorkers>(
        shared_.broken,
        [&](int turn) {
          load_steps(turn);
          fill_tables(turn * steps_);
        },
        [&](int turn) { return gather(turn, turn == 1); });
  }

 private:
  ATTNPACK_DEVICE int64_t head_of_step(int i) const { return group_head(p_, kv_head_, i / steps_of_head_); }
  ATTNPACK_DEVICE int32_t query_of_step(int i) const { return first_query_ + i % steps_of_head_ * kStep; }

  ATTNPACK_DEVICE void load_steps(int turn) {
    if (thread_id() != kWorkers) return;
    arrive_expecting(shared_.owners_there, 2 * kOwners * Width * 2);
    copy_boxes<kOwners, Width>(shared_.owner[0], key_map_, shared_.owners_there, static_cast<int>(first_),
                               place_in_map(p_.key_strides.head, kv_head_), place_in_map(p_.key_strides.batch, b_));
    copy_boxes<kOwners, Width>(shared_.owner[1], value_map_, shared_.owners_there, static_cast<int>(first_),
                               place_in_map(p_.value_strides.head, kv_head_), place_in_map(p_.value_strides.batch, b_));
    for (int i = 0; i < steps_; ++i) {
      const int n = turn * steps_ + i, stage = n % kStages, query = query_of_step(i);
      const int64_t head = head_of_step(i);
      wait(shared_.used[stage], (n / kStages & 1) ^ 1);
      arrive_expecting(shared_.there[stage], kPairBytes);
      copy_boxes<kStep, Width>(shared_.other[stage][0], query_map_, shared_.there[stage], query,
                               place_in_map(p_.query_strides.head, head), place_in_map(p_.query_strides.batch, b_));
      copy_boxes<kStep, Width>(shared_.other[stage][1], out_map_, shared_.there[stage], query,
                               place_in_map(bp_.grad_out_strides.head, head),
                               place_in_map(bp_.grad_out_strides.batch, b_));
    }
  }

  // A warp of its own, of which all lanes arrive: sanitizers follow only threads that do. Rows past the last one see no
  // key.
  ATTNPACK_DEVICE void fill_tables(int done) {
    if (thread_id() / kWarp != kWorkers / kWarp + 1) return;
    for (int i = 0; i < steps_; ++i) {
      const int n = done + i, stage = n % kStages;
      const int64_t head = head_of_step(i);
      wait(shared_.used[stage], (n / kStages & 1) ^ 1);
      bool huge = false;
      for (int r = lane_; r < kStep; r += kWarp) {
        const int64_t query = query_of_step(i) + r, at = (b_ * p_.num_heads + head) * p_.q_len + query;
        Other row{0, 0, 0, 0};
        if (query < p_.q_len) {
          const Range keys = key_range(p_, b_, query);
          row = {static_cast<const float*>(p_.lse)[at] * kLog2E, static_cast<const float*>(bp_.delta)[at],
                 static_cast<int32_t>(keys.begin < keys.end ? keys.begin : 0),
                 static_cast<int32_t>(keys.begin < keys.end ? keys.end : 0)};
        }
        shared_.rows[stage][r] = row;
        huge |= is_huge(row.lse);
      }
      huge = ballot(huge) != 0;
      if (lane_ == 0) shared_.huge[stage] = huge;
      arrive(shared_.there[stage]);
    }
  }

  // Returns whether this thread wrote NaN or Inf.
  ATTNPACK_DEVICE bool gather(int turn, bool cleaned) {
    clear(key_sum_);
    clear(value_sum_);
    wait(shared_.owners_there, turn & 1);
    for (int i = 0; i < steps_; ++i) {
      const int n = turn * steps_ + i, stage = n % kStages;
      Products s, g;
      Weights weights, gradients;
      wait(shared_.there[stage], n / kStages & 1);
      begin_scores<S, kOwners, kStep, Width>(s, shared_.owner[0], 64 * group_, shared_.other[stage][0]);
      begin_scores<S, kOwners, kStep, Width>(g, shared_.owner[1], 64 * group_, shared_.other[stage][1]);
      wait_products<1>();
      hold(s);
      const Other* rows = shared_.rows[stage];
      compute_probabilities(rows, shared_.huge[stage], s);
      pack_weights<S>(s, weights);
      if (cleaned) {
        wait_products<0>();
        Base::clean_others(shared_, stage);
      }
      begin_sum<S, kStep>(value_sum_, weights, shared_.other[stage][1]);
      wait_products<1>();
      hold(g);
      compute_gradients_of_scores(rows, s, g);
      pack_weights<S>(g, gradients);
      begin_sum<S, kStep>(key_sum_, gradients, shared_.other[stage][0]);
      wait_products<0>();
      hold(key_sum_);
      hold(value_sum_);
      hold(weights);
      hold(gradients);
      Base::release(shared_.used[stage]);
    }
    return write(cleaned);
  }

  ATTNPACK_DEVICE int first_owner() const { return 16 * (thread_id() / kWarp); }

  // s: keys by rows. Excluded pairs become -0, the mark of excluded pairs, whatever their products are. Each question
  // is asked once for all scores, because a score has time for few instructions.
  ATTNPACK_DEVICE void compute_probabilities(const Other* rows, bool huge, Products& s) {
    const float multiplier = multiplier_of<Scores::kPlain>(p_);
    // The ranges of later rows never begin or end earlier. A row past the last one ends at 0.
    const Other &lowest = rows[0], &highest = rows[kStep - 1];
    const int32_t end = static_cast<int32_t>(first_) + kOwners;
    const bool inside = lowest.end >= end && highest.end >= end && highest.begin <= first_;
    const int32_t key = static_cast<int32_t>(first_) + first_owner() + lane_ / 4;
    const auto for_each = [&](const auto& change) {
#pragma unroll
      for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) change(s[j][i], rows[8 * j + lane_ % 4 * 2 + (i & 1)], key + (i >> 1) * 8);
    };
    for_each([&](float& x, const Other& row, int32_t) { x = x * multiplier - row.lse; });
    if (huge) for_each([](float& x, const Other&, int32_t) { x = bounded_exponent(x); });
    for_each([](float& x, const Other&, int32_t) { x = power_of_two(x); });
    if (!inside)
      for_each([](float& x, const Other& row, int32_t own) { x = own >= row.begin && own < row.end ? x : -0.f; });
  }
  // g = dS / scale = P (dP - delta).
  ATTNPACK_DEVICE void compute_gradients_of_scores(const Other* rows, const Products& s, Products& g) {
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float gradient = s[j][i] * (g[j][i] - rows[8 * j + lane_ % 4 * 2 + (i & 1)].delta);
        g[j][i] = float_bits(s[j][i]) == 0x80000000u ? 0.f : gradient;
      }
  }

  ATTNPACK_DEVICE bool write(bool cleaned) {
    const float scale = static_cast<float>(p_.scale);
    const auto rows_of = [&](void* base, const Strides& strides) {
      const KeyRows<S> rows = key_rows<S>(base, strides, b_, kv_head_, first_);
      return [rows](int owner) { return const_cast<S*>(rows(owner)); };
    };
    const auto key_row = rows_of(bp_.grad_key, bp_.grad_key_strides);
    const auto value_row = rows_of(bp_.grad_value, bp_.grad_value_strides);
    if (cleaned) {
      const auto number = [&](const void* base, const Strides& strides, bool as_nan) {
        return RowNumber<S>{&p_, static_cast<const S*>(base) + b_ * strides.batch, strides, kv_head_, as_nan};
      };
      const KeySeenByRow seen{&p_, b_, kv_head_, first_};
      sync_threads(kBoth, kWorkers);
      Base::write_cleaned(shared_, key_sum_, scale, count_, p_.head_dim, rows_, key_row,
                          number(p_.query, p_.query_strides, true), seen);
      Base::write_cleaned(shared_, value_sum_, 1.f, count_, p_.v_head_dim, rows_, value_row,
                          number(bp_.grad_out, bp_.grad_out_strides, false), seen);
      return false;
    }
    bool broken = false;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (const int r = first_owner() + lane_ / 4 + 8 * h; r < count_) {
        broken |= write_lane_row(key_sum_, h, scale, key_row(r), p_.head_dim);
        broken |= write_lane_row(value_sum_, h, 1.f, value_row(r), p_.v_head_dim);
      }
    return broken;
  }

  const AttentionBackwardParams& bp_;
  const AttentionParams& p_;
  const TileMap &key_map_, &value_map_, &query_map_, &out_map_;
  Shared& shared_;
  const int lane_, group_;
  int count_, members_;
  int64_t b_, kv_head_, first_;
  Range rows_;
  int32_t first_query_, steps_of_head_, steps_;
  Sums key_sum_, value_sum_;
};

template <class S, int Width>
ATTNPACK_DEVICE void key_gradient_sm90_block(const AttentionBackwardParams& bp, const BackwardPlan& plan,
                                             const TileMap& key_map, const TileMap& value_map, const TileMap& query_map,
                                             const TileMap& out_map, int64_t block, void* shared) {
  using Tile = WarpgroupKeyGradient<S, Width>;
  Tile(bp, plan, key_map, value_map, query_map, out_map, block, *static_cast<typename Tile::Shared*>(shared))
      .compute_gradients();
}

}  // namespace attnpack::cuda
