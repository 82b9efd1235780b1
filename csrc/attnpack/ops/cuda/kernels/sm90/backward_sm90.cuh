#pragma once

#include <attnpack/ops/cuda/kernels/backward_mma.cuh>
#include <attnpack/ops/cuda/kernels/mask_bits.cuh>
#include <attnpack/ops/cuda/kernels/sm90/panels_sm90.cuh>

// Backward on Hopper, with the formulas of backward_mma.cuh. Two warpgroups have 64 owners each, rows or keys. The
// third one copies the others ahead of their use. No sum is shared between blocks, so the bits stay the same. Where
// owners are few, several blocks have a part of the others each (gradient_parts.cuh). Under a bool mask only the steps
// of a list are taken (mask_bits.cuh), and parts share these out.
namespace attnpack::cuda {

// The parts of both backward kernels. Scores have queries and keys of Width, their gradients have gradients of outputs
// and values of Values.
template <class S, int Width, int Values, int Step>
struct WarpgroupBackward {
  static constexpr int kGroups = 2;
  static constexpr int kWorkers = kGroups * kWarpgroup, kThreads = kWorkers + kWarpgroup;
  static constexpr int kOwners = 64 * kGroups;
  static_assert(kOwners == kBackwardOwnersSm90);
  static_assert(Values == backward_values_sm90(Width));
  static constexpr int kStep = Step;  // others per step
  static constexpr int kStages = kBackwardStagesSm90;
  static constexpr int kBoth = 1;                                            // the barrier of the two warpgroups
  static constexpr int kScoreStride = Width + 8, kValueStride = Values + 8;  // as in forward_mma.cuh
  static constexpr int kPairBytes = kStep * (Width + Values) * 2;
  using Products = float[kStep / 8][4];
  using Weights = uint32_t[kStep / 16][4];

  template <int Rows>
  struct Operands {
    S of_scores[Rows * Width], of_values[Rows * Values];
  };

  struct alignas(1024) Shared {
    union {
      struct {
        Operands<kOwners> owners;
        Operands<kStep> others[kStages];
      };
      struct {
        float score_sum[kOwners * kScoreStride], value_sum[kOwners * kValueStride];
      };
    };
    Barrier owners_there, there[kStages], used[kStages];
    bool broken[kThreads / kWarp];  // of each warp (any_in_all)
  };

  // The part of a list that is a block's.
  ATTNPACK_DEVICE static ListedSteps steps_of_part(const ListedSteps& all, int64_t parts, int64_t part) {
    const Range mine = others_of_part({0, all.count}, 0, 1, parts, part);
    return {all.numbers + mine.begin, static_cast<int32_t>(mine.end - mine.begin)};
  }
  ATTNPACK_DEVICE static void set_up_barriers(Shared& shared, int arrivals) {
    if (thread_id() == 0) {
      set_up(shared.owners_there, 1);
      for (int stage = 0; stage < kStages; ++stage) {
        set_up(shared.there[stage], arrivals);
        set_up(shared.used[stage], kWorkers / kWarp);
      }
      publish_barriers();
      for (bool& each : shared.broken) each = false;
    }
  }
  ATTNPACK_DEVICE static void release(Barrier& barrier) {
    sync_warp();
    if (thread_id() % kWarp == 0) arrive(barrier);
  }
  // Sets NaN and Inf among the others of a step to 0. All products that need them as they are have ended.
  ATTNPACK_DEVICE static void clean_others(Shared& shared, int stage) {
    sync_threads(kBoth, kWorkers);
    clean_tile<kStep*(Width + Values), kWorkers>(shared.others[stage].of_scores);
    fence_stores();
    sync_threads(kBoth, kWorkers);
  }
  // The gradients of a warp's 16 owners, which stand in a table, with the NaN and Inf of others that they see.
  // to(owner): its row.
  template <int Stride, class To, class Number, class Sees>
  ATTNPACK_DEVICE static void write_cleaned(float* sum, int count, int64_t width, const Range& others, const To& to,
                                            const Number& number, const Sees& sees) {
    const int first = 16 * (thread_id() / kWarp), end = first + 16 < count ? first + 16 : count;
    sync_warp();
    if (others.begin < others.end)
      add_broken(sum, Stride, {first, 1, end, static_cast<int>(width)}, others, number, sees);
    for (int owner = first; owner < end; ++owner)
      for (int64_t c = thread_id() % kWarp; c < width; c += kWarp) narrow(sum[owner * Stride + c], to(owner) + c);
  }
};

}  // namespace attnpack::cuda
