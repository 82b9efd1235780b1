#pragma once

#include <attnpack/ops/cuda/kernels/key_source.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>
#include <attnpack/ops/cuda/kernels/tiles.cuh>

// Latent decode (DeepSeek-V2, section 2.1.2, with the up-projections absorbed). The keys are [latent, rotated] and the
// values are the latent itself, so each key is read once and serves both products. The rows are the query heads. The
// warps share the scores out by rows and keys, but the output by columns, because an output row is too wide for the
// registers of one warp. So the weights pass from warp to warp through shared memory.
namespace attnpack::cuda {

template <class S, int RowTiles, int Warps>
class LatentTile {
 public:
  static constexpr int kThreads = kWarp * Warps;
  static constexpr int kRows = 16 * RowTiles;
  static constexpr int kKeys = 32;  // keys per step
  static constexpr int kWidth = static_cast<int>(kLatentHeadDim), kValues = static_cast<int>(kLatentValueDim);
  static constexpr int kGroups = Warps / RowTiles;     // warps that share the keys of a row
  static constexpr int kBlocks = kKeys / 8 / kGroups;  // blocks of 8 keys per warp
  static constexpr int kColumns = kValues / Warps;     // columns of the output per warp
  static constexpr int kWeightStride = kKeys + 8;      // 80 bytes: eight rows lie in different groups of banks
  static constexpr int kOutStride = kValues + 8;       // as in forward_mma.cuh

  struct Shared {
    union {
      struct {
        S query[kRows * kWidth], key[2][kKeys * kWidth], weight[kRows * kWeightStride];
      };
      struct {
        float out[kRows * kOutStride], sum[kGroups][kRows], max[kRows];
      } end;
    };
    float top[kGroups][kRows], factor[kRows];
    Row rows[kRows];
  };

  ATTNPACK_DEVICE LatentTile(const AttentionParams& p, const ForwardPlan& plan, void* workspace, const Unit& u,
                             Shared& shared)
      : p_(p),
        plan_(plan),
        workspace_(workspace),
        u_(u),
        shared_(shared),
        lane_(thread_id() % kWarp),
        warp_(thread_id() / kWarp),
        row_tile_(warp_ % RowTiles),
        group_(warp_ / RowTiles) {}

  ATTNPACK_DEVICE void compute_outputs() {
    attend_rows<kRows>(p_, u_, [&](int count, bool cleaned) { return attend(count, cleaned); });
  }

 private:
  // Returns whether this thread wrote NaN or Inf.
  ATTNPACK_DEVICE bool attend(int count, bool cleaned) {
    copy_query<kRows, kWidth, kThreads>(shared_.query, p_, u_, count);
    fill_rows(p_, u_.sequence, u_.kv_head, u_.first, kRows, shared_.rows);
    const LaneRows lane_rows = lane_rows_of(shared_.rows + 16 * row_tile_);
#pragma unroll
    for (int t = 0; t < RowTiles; ++t)
#pragma unroll
      for (int d = 0; d < kColumns / 8; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[t][d][i] = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max_[h] = -infinity<float>();
      sum_[h] = 0;
    }
    stream_steps<kKeys>(
        u_.keys, [&](int64_t begin, int stage) { load_keys(begin, stage); },
        [&](int64_t begin, int stage) {
          compute_weights(lane_rows, begin, stage);
          sync_block();
          if (cleaned) {  // only now, because the scores need the keys as they are
            clean_tile<kKeys * kWidth, kThreads>(shared_.key[stage]);
            sync_block();
          }
          add_values(stage);
        });
    return write_outputs(count, cleaned);
  }

  ATTNPACK_DEVICE void load_keys(int64_t begin, int stage) {
    const int64_t left = u_.keys.end - begin;
    const auto keys = plain_rows<S>(p_.key, p_.key_strides, u_);
    copy_tile<kKeys, kWidth, kThreads>(
        shared_.key[stage], [&](int r) { return keys(begin + r); }, static_cast<int>(left < kKeys ? left : kKeys),
        kWidth, static_cast<const S*>(p_.key));
  }

  // Turns the scores of this warp's 16 rows with its blocks of keys into weights in shared memory, and sets the rows'
  // factors.
  ATTNPACK_DEVICE void compute_weights(const LaneRows& lane_rows, int64_t begin, int stage) {
    const int first = group_ * kBlocks * 8;
    float s[kBlocks][4] = {};
    for (int k = 0; k < kWidth / 16; k += 2) {
      uint32_t a[2][4];
      const Place at = lane_for_a(lane_);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        load_matrices(a[i], shared_.query + swizzled_offset(16 * row_tile_ + at.row, 2 * (k + i) + at.column, kWidth));
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        uint32_t b[4];  // of one block of keys, two steps in k
        load_matrices(b, shared_.key[stage] + swizzled_offset(first + 8 * j + lane_ % 8, 2 * k + lane_ / 8, kWidth));
        multiply_add<S>(s[j], a[0], b[0], b[1]);
        multiply_add<S>(s[j], a[1], b[2], b[3]);
      }
    }
    finish_scores(p_, u_.b, lane_rows, begin + first, s);
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = -infinity<float>();
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) top[h] = larger(top[h], larger(s[j][2 * h], s[j][2 * h + 1]));
      top[h] = row_max(top[h]);
      if (lane_ % 4 == 0) shared_.top[group_][row_of(h)] = top[h];
    }
    sync_block();
    const float multiplier = multiplier_of(p_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float raised = max_[h];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) raised = larger(raised, shared_.top[g][row_of(h)]);
      const float factor = raise_row<Scores::kAny>(multiplier, s, h, raised, max_[h], sum_[h]);
      if (group_ == 0 && lane_ % 4 == 0) shared_.factor[row_of(h)] = factor;
    }
    if (p_.dropout_p > 0) drop_weights(p_, u_.b, lane_rows, begin + first, s);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<uint32_t*>(shared_.weight + row_of(h) * kWeightStride + first + 8 * j + lane_ % 4 * 2) =
            pack<S>(s[j][2 * h], s[j][2 * h + 1]);
  }

  // Adds the values to this warp's columns of all rows.
  ATTNPACK_DEVICE void add_values(int stage) {
#pragma unroll
    for (int t = 0; t < RowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = shared_.factor[16 * t + lane_ / 4 + 8 * h];
        if (factor != 1)
#pragma unroll
          for (int d = 0; d < kColumns / 8; ++d) {
            out_[t][d][2 * h] *= factor;
            out_[t][d][2 * h + 1] *= factor;
          }
      }
    sync_warp();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[RowTiles][4];
      const Place row = lane_for_a(lane_), at = lane_for_b_transposed(lane_);
#pragma unroll
      for (int t = 0; t < RowTiles; ++t)
        load_matrices(a[t], shared_.weight + (16 * t + row.row) * kWeightStride + 16 * k + 8 * row.column);
#pragma unroll
      for (int d = 0; d < kColumns / 8; d += 2) {
        uint32_t b[4];
        load_matrices_transposed(
            b, shared_.key[stage] + swizzled_offset(16 * k + at.row, warp_ * (kColumns / 8) + d + at.column, kWidth));
#pragma unroll
        for (int t = 0; t < RowTiles; ++t) {
          multiply_add<S>(out_[t][d], a[t], b[0], b[1]);
          multiply_add<S>(out_[t][d + 1], a[t], b[2], b[3]);
        }
      }
    }
  }

  ATTNPACK_DEVICE bool write_outputs(int count, bool cleaned) {
    auto& end = shared_.end;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] = row_sum(sum_[h]);
      if (lane_ % 4 == 0) {
        end.sum[group_][row_of(h)] = sum_[h];
        if (group_ == 0) end.max[row_of(h)] = max_[h] * (multiplier_of(p_) / kLog2E);
      }
    }
#pragma unroll
    for (int t = 0; t < RowTiles; ++t)
#pragma unroll
      for (int d = 0; d < kColumns / 8; ++d)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          store_pair(end.out + (16 * t + lane_ / 4 + 8 * h) * kOutStride + warp_ * kColumns + 8 * d + lane_ % 4 * 2,
                     out_[t][d][2 * h], out_[t][d][2 * h + 1]);
    sync_block();
    if (cleaned)
      add_broken(end.out, kOutStride, {warp_, Warps, count, kValues}, u_.keys,
                 NumberOfRows<PlainRows<S>>{plain_rows<S>(p_.value, p_.value_strides, u_)},
                 RowSeesKey{&p_, u_.b, shared_.rows});
    const auto state = [&](int r) {
      Softmax<float> row{end.max[r], 0};
#pragma unroll
      for (int g = 0; g < kGroups; ++g) row.sum += end.sum[g][r];
      return row;
    };
    return write_tile<S>(p_, plan_, workspace_, u_, count, shared_.rows, kThreads, state,
                         [&](int r) { return [&, r](int64_t c) { return end.out[r * kOutStride + c]; }; });
  }

  ATTNPACK_DEVICE int row_of(int h) const { return 16 * row_tile_ + lane_ / 4 + 8 * h; }

  const AttentionParams& p_;
  const ForwardPlan& plan_;
  void* workspace_;
  const Unit& u_;
  Shared& shared_;
  const int lane_, warp_, row_tile_, group_;
  float out_[RowTiles][kColumns / 8][4], max_[2], sum_[2];
};

template <class S, int RowTiles, int Warps>
ATTNPACK_DEVICE void forward_latent_block(const AttentionParams& p, const ForwardPlan& plan, void* workspace,
                                          int64_t block, void* shared) {
  using Tile = LatentTile<S, RowTiles, Warps>;
  const Unit u = unit_of(p, plan, block);
  Tile(p, plan, workspace, u, *static_cast<typename Tile::Shared*>(shared)).compute_outputs();
}

}  // namespace attnpack::cuda
