#pragma once

#include <attnpack/ops/cuda/kernels/key_source.cuh>
#include <attnpack/ops/cuda/kernels/mask_bits.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>
#include <attnpack/ops/cuda/kernels/sm90/panels_sm90.cuh>
#include <attnpack/ops/cuda/kernels/tiles.cuh>

// Prefill on Hopper (FlashAttention-3, Shah et al. 2024). Two or three warpgroups have 64 query rows each. The last one
// copies boxes of keys and values ahead of their use. The products of a step run beside the softmax of the step before:
// scores of step i and values of step i - 1 are one group of products. The warpgroups take turns, so that one forms
// products while the others form weights. Where rows are wide, products take longer than weights and nobody waits for a
// turn; then the output so far is rescaled beside the scores. Under a bool mask only the steps of a list are taken
// (mask_bits.cuh).
namespace attnpack::cuda {

template <class S, int Width, int Values, Scores Kind, int Groups = 2>
class WarpgroupForward {
 public:
  static constexpr int kGroups = Groups;
  static constexpr int kWorkers = kGroups * kWarpgroup, kThreads = kWorkers + kWarpgroup;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kKeys = Values <= 128 ? 128 : 64;  // per step
  static_assert(kKeys <= kMostKeysOfStep && kKeys == forward_keys_sm90(Width));
  static constexpr int kStages = 2;
  static constexpr bool kTakesTurns = Width <= 128;
  static constexpr int kOutStride = Values + 8;  // as in forward_mma.cuh

  struct alignas(1024) Shared {
    union {
      struct {
        S query[kRows * Width], key[kStages][kKeys * Width], value[kStages][kKeys * Values];
      };
      struct {
        float out[kRows * kOutStride], max[kRows], sum[kRows];
      } end;
    };
    Row rows[kRows];
    Unit unit;  // not in registers, as in forward_mma.cuh
    Barrier keys_there[kStages], keys_used[kStages], values_there[kStages], values_used[kStages];
    ListedStep listed[kStages];     // under a mask: of the keys that are there
    bool broken[kThreads / kWarp];  // of each warp (any_in_all)
  };

  ATTNPACK_DEVICE WarpgroupForward(const AttentionParams& p, const ForwardPlan& plan, const TileMap& key_map,
                                   const TileMap& value_map, void* workspace, const Unit& u, Shared& shared)
      : p_(p),
        plan_(plan),
        key_map_(key_map),
        value_map_(value_map),
        workspace_(workspace),
        u_(u),
        shared_(shared),
        lane_(thread_id() % kWarp),
        group_(thread_id() / kWarpgroup),
        first_key_(static_cast<int32_t>(u.keys.begin / kKeys * kKeys)),
        listed_(kMasked ? steps_of_keys(plan.lists, workspace, u.b, u.kv_head, u.first / kRows, u.keys)
                        : ListedSteps{}),
        steps_(kMasked ? listed_.count : (static_cast<int32_t>(u.keys.end) - first_key_ + kKeys - 1) / kKeys) {}

  ATTNPACK_DEVICE void compute_outputs() {
    if (count_rows() <= 0) return;
    if (thread_id() == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        set_up(shared_.keys_there[stage], 1);
        set_up(shared_.values_there[stage], 1);
        set_up(shared_.keys_used[stage], kWorkers / kWarp);
        set_up(shared_.values_used[stage], kWorkers / kWarp);
      }
      publish_barriers();
      for (bool& each : shared_.broken) each = false;
    }
    fill_table();
    run_roles<kWorkers>(
        shared_.broken, [&](int turn) { load_steps(turn * steps_); },
        [&](int turn) { return attend(turn * steps_, turn == 1); });
  }

 private:
  // Asked where it is needed, because registers are short in the loop.
  ATTNPACK_DEVICE int count_rows() const {
    const int64_t left = count_head_rows(p_, u_.sequence, u_.kv_head) - u_.first;
    return static_cast<int>(left < kRows ? left : kRows);
  }

  static constexpr bool kMasked = Kind == Scores::kMasked;
  static constexpr int kBlocks = kKeys / 8;
  using Products = float[kBlocks][4];
  using Weights = uint32_t[kKeys / 16][4];

  // Keys of other parts are not this unit's, but may lie in its first or last step.
  ATTNPACK_DEVICE void fill_table() {
    fill_rows(p_, u_.sequence, u_.kv_head, u_.first, kRows, shared_.rows);
    if (thread_id() < kRows) {
      Row& row = shared_.rows[thread_id()];
      const Range keys = intersection({row.begin, row.end}, u_.keys);
      row.begin = static_cast<int32_t>(keys.begin);
      row.end = static_cast<int32_t>(keys.end);
    }
    sync_block();
  }

  // Steps are counted from the first one of the first turn, so that the phases of the barriers go on. done: those of
  // turns before.
  ATTNPACK_DEVICE void load_steps(int done) {
    if (thread_id() != kWorkers) return;
    int32_t key = 0, key_before = 0;
    for (int i = 0; i <= steps_; ++i) {
      if (const int n = done + i, stage = n % kStages; i < steps_) {
        wait(shared_.keys_used[stage], (n / kStages & 1) ^ 1);
        if constexpr (kMasked) shared_.listed[stage] = listed_[i];
        key = step_of(i, stage).first_key;
        load<Width>(shared_.key[stage], key_map_, p_.key_strides, shared_.keys_there[stage], key);
      }
      if (const int n = done + i - 1, stage = n % kStages; i > 0) {
        wait(shared_.values_used[stage], (n / kStages & 1) ^ 1);
        load<Values>(shared_.value[stage], value_map_, p_.value_strides, shared_.values_there[stage], key_before);
      }
      key_before = key;
    }
  }
  template <int Columns>
  ATTNPACK_DEVICE void load(S* tile, const TileMap& map, const Strides& strides, Barrier& there, int32_t key) {
    arrive_expecting(there, kKeys * Columns * 2);
    copy_boxes<kKeys, Columns>(tile, map, there, static_cast<int32_t>(u_.first_key) + key,
                               place_in_map(strides.head, u_.kv_head), place_in_map(strides.batch, u_.b));
  }

  struct Step {
    int32_t first_key;
    bool hides;  // whether the mask hides any pair
  };
  // Step i. Its keys are in the stage, and not yet released.
  ATTNPACK_DEVICE Step step_of(int i, int stage) const {
    if constexpr (kMasked) return {shared_.listed[stage].step() * kKeys, shared_.listed[stage].hides()};
    return {first_key_ + i * kKeys, false};
  }
  // The mask's bits of the lane's rows, read beside the products.
  using Bits = MaskWords<kKeys / 32>;
  ATTNPACK_DEVICE void load_bits(const Step& step, Bits (&bits)[2]) const {
    if constexpr (kMasked)
      if (step.hides) load_mask(plan_.mask, workspace_, mask_, step.first_key, bits);
  }

  // Returns whether this thread wrote NaN or Inf.
  ATTNPACK_DEVICE bool attend(int done, bool cleaned) {
    load_query(count_rows());
    if constexpr (kMasked) mask_.find(plan_.mask, u_.b, lane_rows());
    clear(out_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max_[h] = -infinity<float>();
      sum_[h] = 0;
    }
    if (steps_ > 0) {
      Products s;
      Weights weights;
      float factor[2];
      Bits bits[2];
      wait(shared_.keys_there[done % kStages], done / kStages & 1);
      Step step = step_of(0, done % kStages);
      multiply_keys(done % kStages, s);
      load_bits(step, bits);
      wait_products<0>();
      hold(s);
      release(shared_.keys_used[done % kStages]);
      apply_softmax(lane_rows(), step, bits, s, factor);
      // The warpgroups clean values together, so no turns then. A turn is of one that waits and the one before it.
      const bool in_turn = kTakesTurns && !cleaned;
      if (in_turn && group_ == kGroups - 1) arrive_threads(kTurn, 2 * kWarpgroup);
      for (int i = 1; i < steps_; ++i) {
        const int n = done + i, stage = n % kStages, before = (n - 1) % kStages;
        end_values(stage, i > 1, s, weights);  // step n - 2 had this stage too
        if constexpr (kTakesTurns) rescale(factor);
        wait(shared_.keys_there[stage], n / kStages & 1);
        step = step_of(i, stage);
        if (in_turn) sync_threads(kTurn + group_, 2 * kWarpgroup);
        multiply_keys(stage, s);
        if constexpr (!kTakesTurns) rescale(factor);
        wait(shared_.values_there[before], (n - 1) / kStages & 1);
        if (cleaned) clean_values(before);
        add_values(before, weights);
        if (in_turn) arrive_threads(kTurn + (group_ + 1) % kGroups, 2 * kWarpgroup);
        const LaneRows rows = lane_rows();  // read in each step, as the unit is, and ahead of the wait
        load_bits(step, bits);
        wait_products<1>();
        hold(s);
        release(shared_.keys_used[stage]);
        apply_softmax(rows, step, bits, s, factor);
      }
      end_values((done + steps_) % kStages, steps_ > 1, s, weights);
      rescale(factor);
      if (in_turn && group_ == 0) sync_threads(kTurn, 2 * kWarpgroup);
      const int last = done + steps_ - 1;
      wait(shared_.values_there[last % kStages], last / kStages & 1);
      clean_last_values(last % kStages, cleaned, kMasked ? step.first_key : first_key_ + (steps_ - 1) * kKeys);
      add_values(last % kStages, weights);
      wait_products<0>();
      hold(out_);
      release(shared_.values_used[last % kStages]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum_[h] = row_sum(sum_[h]);
    return cleaned ? write_cleaned(count_rows()) : write_outputs(count_rows());
  }

  // The barriers of the warpgroups, and that of all of them.
  static constexpr int kTurn = 1, kAll = kTurn + kGroups;
  static_assert(kAll < kAllThreads);

  ATTNPACK_DEVICE int first_row() const { return 16 * (thread_id() / kWarp); }
  ATTNPACK_DEVICE LaneRows lane_rows() const { return lane_rows_of(shared_.rows + first_row()); }

  ATTNPACK_DEVICE void release(Barrier& barrier) {
    sync_warp();
    if (lane_ == 0) arrive(barrier);
  }

  ATTNPACK_DEVICE void load_query(int count) {
    const S* base = static_cast<const S*>(p_.query);
    copy_panels<kRows, Width, kWorkers>(shared_.query, query_rows<S>(base, p_.query_strides, u_.b, shared_.rows), count,
                                        p_.head_dim, base);
    copy_async_commit();
    copy_async_wait<0>();
    fence_stores();
    sync_threads(kAll, kWorkers);
  }

  ATTNPACK_DEVICE void multiply_keys(int stage, Products& s) {
    begin_scores<S, kRows, kKeys, Width>(s, shared_.query, 64 * group_, shared_.key[stage]);
  }
  ATTNPACK_DEVICE void add_values(int stage, Weights& weights) {
    begin_sum<S, kKeys>(out_, weights, shared_.value[stage]);
  }

  // Ends the products of the values of a stage, if there are any, and packs the weights s of the step after it. This
  // begins a turn of the loop, because ptxas moves a wait that ends one to before the softmax, which would then wait
  // too.
  ATTNPACK_DEVICE void end_values(int stage, bool some, const Products& s, Weights& weights) {
    wait_products<0>();
    hold(out_);
    hold(weights);
    if (some) release(shared_.values_used[stage]);
    pack_weights<S>(s, weights);
  }

  // Turns s into weights, and updates max and sum. factor: of the output so far.
  ATTNPACK_DEVICE void apply_softmax(const LaneRows& rows, const Step& step, const Bits (&bits)[2], Products& s,
                                     float (&factor)[2]) {
    if constexpr (kMasked)
      if (step.hides) hide_scores(bits, s);
    finish_scores<Kind>(p_, u_.b, rows, step.first_key, s);
    raise_softmax<Kind>(p_, s, max_, sum_, factor);
    if constexpr (Kind == Scores::kAny)
      if (p_.dropout_p > 0) drop_weights(p_, u_.b, rows, step.first_key, s);
  }
  ATTNPACK_DEVICE void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int d = 0; d < Values / 8; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[d][i] *= factor[i / 2];
  }
  ATTNPACK_DEVICE void clean_values(int stage) {
    clean_tile<kKeys * Values, kWorkers>(shared_.value[stage]);
    fence_stores();
    sync_threads(kAll, kWorkers);
  }
  // Values past the unit's keys may be anything: their weights are 0, but 0 * NaN is not.
  ATTNPACK_DEVICE void clean_last_values(int stage, bool cleaned, int32_t first_key) {
    if (cleaned) return clean_values(stage);
    const int left = static_cast<int32_t>(u_.keys.end) - first_key;
    if (left >= kKeys) return;
    clear_rows<kKeys, Values, kWorkers>(shared_.value[stage], left);
    fence_stores();
    sync_threads(kAll, kWorkers);
  }

  ATTNPACK_DEVICE Softmax<float> state(int h) const { return {max_[h] * (multiplier_of<Kind>(p_) / kLog2E), sum_[h]}; }

  // Writes this thread's rows from its registers.
  ATTNPACK_DEVICE bool write_outputs(int count) {
    bool broken = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = first_row() + lane_ / 4 + 8 * h;
      if (r >= count) continue;
      broken |= write_lane_result<S>(p_, plan_, workspace_, u_, u_.first + r, shared_.rows[r], state(h), out_, h, 0);
    }
    return broken;
  }

  // As in forward_mma.cuh: NaN and Inf of the keys that a row sees are added to it.
  ATTNPACK_DEVICE bool write_cleaned(int count) {
    auto& end = shared_.end;
    sync_threads(kAll, kWorkers);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = first_row() + lane_ / 4 + 8 * h;
      if (lane_ % 4 == 0) {
        end.max[r] = state(h).max;
        end.sum[r] = sum_[h];
      }
    }
    put_fragments<kOutStride>(end.out, out_, first_row());
    sync_threads(kAll, kWorkers);
    return write_broken<S>(p_, plan_, workspace_, u_, count, kWorkers, shared_.rows, end.out, kOutStride, end.max,
                           end.sum);
  }

  const AttentionParams& p_;
  const ForwardPlan& plan_;
  const TileMap &key_map_, &value_map_;
  void* workspace_;
  const Unit& u_;
  Shared& shared_;
  const int lane_, group_;
  const int32_t first_key_;
  const ListedSteps listed_;
  const int32_t steps_;
  LaneMask mask_;
  float out_[Values / 8][4], max_[2], sum_[2];
};

template <class Tile>
ATTNPACK_DEVICE void forward_sm90_block(const AttentionParams& p, const ForwardPlan& plan, const TileMap& key_map,
                                        const TileMap& value_map, void* workspace, int64_t block, void* shared) {
  auto& tile = *static_cast<typename Tile::Shared*>(shared);
  if (thread_id() == 0) tile.unit = unit_of(p, plan, block);
  sync_block();
  Tile(p, plan, key_map, value_map, workspace, tile.unit, tile).compute_outputs();
}

}  // namespace attnpack::cuda
