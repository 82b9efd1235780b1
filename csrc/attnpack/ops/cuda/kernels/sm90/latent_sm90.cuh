#pragma once

#include <attnpack/ops/cuda/kernels/key_source.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>
#include <attnpack/ops/cuda/kernels/sm90/panels_sm90.cuh>

// Latent decode of plain calls on Hopper, with the formulas of forward_latent.cuh. Both warpgroups have the same 64
// rows. The scores of a step are one warpgroup's, in turns. The output is shared out by columns, because an output row
// is too wide for the registers of one of them. So the weights pass through shared memory. The third warpgroup copies
// keys ahead of their use.
namespace attnpack::cuda {

template <class S>
class WarpgroupLatent {
 public:
  static constexpr int kGroups = 2;
  static constexpr int kWorkers = kGroups * kWarpgroup, kThreads = kWorkers + kWarpgroup;
  static constexpr int kRows = static_cast<int>(kLatentTileRows);
  static constexpr int kKeys = 64;  // per step
  static constexpr int kStages = 2;
  static constexpr int kWidth = static_cast<int>(kLatentHeadDim), kValues = static_cast<int>(kLatentValueDim);
  static constexpr int kColumns = kValues / kGroups;  // of the output, per warpgroup
  static constexpr int kOutStride = kValues + 8;      // as in forward_mma.cuh
  static constexpr int kTileBytes = kKeys * kWidth * 2;

  struct alignas(1024) Shared {
    union {
      struct {
        S query[kRows * kWidth], key[kStages][kKeys * kWidth], weight[kRows * kKeys];
      };
      struct {
        float out[kRows * kOutStride], max[kRows], sum[kRows];
      } end;
    };
    // A row's maximum, the factor of its output so far, and at the end its sum in each warpgroup.
    float max[kRows], factor[kRows], sum[kGroups][kRows];
    Row rows[kRows];
    Unit unit;  // not in registers, as in forward_mma.cuh
    Barrier there[kStages], used[kStages];
    bool broken[kThreads / kWarp];  // of each warp (any_in_all)
  };

  ATTNPACK_DEVICE WarpgroupLatent(const AttentionParams& p, const ForwardPlan& plan, const TileMap& key_map,
                                  void* workspace, const Unit& u, Shared& shared)
      : p_(p),
        plan_(plan),
        key_map_(key_map),
        workspace_(workspace),
        u_(u),
        shared_(shared),
        lane_(thread_id() % kWarp),
        group_(thread_id() / kWarpgroup),
        first_key_(static_cast<int32_t>(u.keys.begin / kKeys * kKeys)),
        steps_((static_cast<int32_t>(u.keys.end) - first_key_ + kKeys - 1) / kKeys) {}

  ATTNPACK_DEVICE void compute_outputs() {
    const int64_t left = count_head_rows(p_, u_.sequence, u_.kv_head) - u_.first;
    if (left <= 0) return;
    const int count = static_cast<int>(left < kRows ? left : kRows);
    if (thread_id() == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        set_up(shared_.there[stage], 1);
        set_up(shared_.used[stage], kWorkers / kWarp);
      }
      publish_barriers();
      for (bool& each : shared_.broken) each = false;
    }
    fill_rows(p_, u_.sequence, u_.kv_head, u_.first, kRows, shared_.rows);
    run_roles<kWorkers>(
        shared_.broken, [&](int turn) { load_steps(turn * steps_); },
        [&](int turn) { return attend(count, turn * steps_, turn == 1); });
  }

 private:
  static constexpr int kBlocks = kKeys / 8;
  // Barriers of the two warpgroups: the weights may be replaced; they are there.
  static constexpr int kFree = 1, kReady = 2;

  ATTNPACK_DEVICE void load_steps(int done) {
    if (thread_id() != kWorkers) return;
    for (int i = 0; i < steps_; ++i) {
      const int n = done + i, stage = n % kStages;
      wait(shared_.used[stage], (n / kStages & 1) ^ 1);
      arrive_expecting(shared_.there[stage], kTileBytes);
      copy_boxes<kKeys, kWidth>(shared_.key[stage], key_map_, shared_.there[stage],
                                static_cast<int32_t>(u_.first_key) + first_key_ + i * kKeys,
                                place_in_map(p_.key_strides.head, u_.kv_head),
                                place_in_map(p_.key_strides.batch, u_.b));
    }
  }

  // Returns whether this thread wrote NaN or Inf.
  ATTNPACK_DEVICE bool attend(int count, int done, bool cleaned) {
    const S* base = static_cast<const S*>(p_.query);
    copy_panels<kRows, kWidth, kWorkers>(shared_.query, query_rows<S>(base, p_.query_strides, u_.b, shared_.rows),
                                         count, kWidth, base);
    copy_async_commit();
    if (thread_id() < kRows) shared_.max[thread_id()] = -infinity<float>();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max_[h] = -infinity<float>();
      sum_[h] = 0;
    }
    copy_async_wait<0>();
    fence_stores();
    sync_threads(kReady, kWorkers);
    clear(out_);
    for (int i = 0; i < steps_; ++i) {
      const int n = done + i, stage = n % kStages;
      wait(shared_.there[stage], n / kStages & 1);
      if (i % kGroups == group_) {
        float s[kBlocks][4];
        begin_scores<S, kRows, kKeys, kWidth>(s, shared_.query, 0, shared_.key[stage]);
        const LaneRows rows = lane_rows_of(shared_.rows + first_row());
        wait_products<0>();
        hold(s);
        finish_scores<Scores::kPlain>(p_, u_.b, rows, first_key_ + i * kKeys, s);
        compute_weights(s);
      } else {
        sync_threads(kFree, kWorkers);
      }
      clean_values(i, stage, cleaned);
      fence_stores();
      sync_threads(kReady, kWorkers);
      rescale();
      begin_sum_of_shared<S, kRows, kKeys>(out_, shared_.weight,
                                           shared_.key[stage] + group_ * kColumns / kPanel * kKeys * kPanel);
      wait_products<0>();
      hold(out_);
      sync_warp();
      if (lane_ == 0) arrive(shared_.used[stage]);
    }
    join_sums();
    return cleaned ? write_cleaned(count) : write_outputs(count);
  }

  ATTNPACK_DEVICE int first_row() const { return 16 * (thread_id() % kWarpgroup / kWarp); }
  ATTNPACK_DEVICE int row_of(int h) const { return first_row() + lane_ / 4 + 8 * h; }

  // Turns scores into weights in shared memory, and updates max and sum. Before it stores them, the other warpgroup has
  // used those of the step before.
  ATTNPACK_DEVICE void compute_weights(float (&s)[kBlocks][4]) {
    const float multiplier = multiplier_of<Scores::kPlain>(p_);
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = shared_.max[row_of(h)];
      float top = before;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) top = larger(top, larger(s[j][2 * h], s[j][2 * h + 1]));
      top = row_max(top);
      const float base = finite_max(top);
      factor[h] = top == before ? 1.f : power_of_two((before - base) * multiplier);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
#pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; ++c) {
          s[j][c] = power_of_two(s[j][c] * multiplier - base * multiplier);
          sum += s[j][c];
        }
      sum_[h] = sum_[h] * (top == max_[h] ? 1.f : power_of_two((max_[h] - base) * multiplier)) + sum;
      max_[h] = top;
    }
    sync_threads(kFree, kWorkers);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane_ % 4 == 0) {
        shared_.max[row_of(h)] = max_[h];
        shared_.factor[row_of(h)] = factor[h];
      }
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
        *reinterpret_cast<uint32_t*>(shared_.weight + panel_offset<kRows>(row_of(h), j) + lane_ % 4 * 2) =
            pack<S>(s[j][2 * h], s[j][2 * h + 1]);
    }
  }

  // Values past the last key may be anything: their weights are 0, but 0 * NaN is not. No product needs the keys as
  // they are any more.
  ATTNPACK_DEVICE void clean_values(int i, int stage, bool cleaned) {
    if (cleaned)
      clean_tile<kKeys * kWidth, kWorkers>(shared_.key[stage]);
    else if (const int left = static_cast<int32_t>(u_.keys.end) - (first_key_ + i * kKeys); left < kKeys)
      clear_rows<kKeys, kWidth, kWorkers>(shared_.key[stage], left);
  }

  ATTNPACK_DEVICE void rescale() {
    const float factor[2] = {shared_.factor[row_of(0)], shared_.factor[row_of(1)]};
    if (!ballot(factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (int d = 0; d < kColumns / 8; ++d)
#pragma unroll
      for (int c = 0; c < 4; ++c) out_[d][c] *= factor[c / 2];
  }

  // The warpgroups' sums belong to the maxima of their own last steps.
  ATTNPACK_DEVICE void join_sums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = shared_.max[row_of(h)];
      const float factor =
          top == max_[h] ? 1.f : power_of_two((max_[h] - finite_max(top)) * multiplier_of<Scores::kPlain>(p_));
      const float sum = row_sum(sum_[h]) * factor;
      if (lane_ % 4 == 0) shared_.sum[group_][row_of(h)] = sum;
      max_[h] = top;
    }
    sync_threads(kReady, kWorkers);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum_[h] = shared_.sum[0][row_of(h)] + shared_.sum[1][row_of(h)];
  }

  ATTNPACK_DEVICE Softmax<float> state(int h) const {
    return {max_[h] * (multiplier_of<Scores::kPlain>(p_) / kLog2E), sum_[h]};
  }

  // Writes this thread's rows from its registers.
  ATTNPACK_DEVICE bool write_outputs(int count) {
    bool broken = false;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (row_of(h) < count)
        broken |= write_lane_result<S>(p_, plan_, workspace_, u_, u_.first + row_of(h), shared_.rows[row_of(h)],
                                       state(h), out_, h, group_ * kColumns);
    return broken;
  }

  // As in forward_mma.cuh: NaN and Inf of the keys that a row sees are added to it.
  ATTNPACK_DEVICE bool write_cleaned(int count) {
    auto& end = shared_.end;
    sync_threads(kReady, kWorkers);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (lane_ % 4 == 0 && group_ == 0) {
        end.max[row_of(h)] = state(h).max;
        end.sum[row_of(h)] = sum_[h];
      }
    put_fragments<kOutStride>(end.out + group_ * kColumns, out_, first_row());
    sync_threads(kReady, kWorkers);
    return write_broken<S>(p_, plan_, workspace_, u_, count, kWorkers, shared_.rows, end.out, kOutStride, end.max,
                           end.sum);
  }

  const AttentionParams& p_;
  const ForwardPlan& plan_;
  const TileMap& key_map_;
  void* workspace_;
  const Unit& u_;
  Shared& shared_;
  const int lane_, group_;
  const int32_t first_key_, steps_;
  float out_[kColumns / 8][4], max_[2], sum_[2];
};

template <class S>
ATTNPACK_DEVICE void latent_sm90_block(const AttentionParams& p, const ForwardPlan& plan, const TileMap& key_map,
                                       void* workspace, int64_t block, void* shared) {
  using Tile = WarpgroupLatent<S>;
  auto& tile = *static_cast<typename Tile::Shared*>(shared);
  if (thread_id() == 0) tile.unit = unit_of(p, plan, block);
  sync_block();
  Tile(p, plan, key_map, workspace, tile.unit, tile).compute_outputs();
}

}  // namespace attnpack::cuda
