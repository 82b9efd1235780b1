#pragma once

#include <attnpack/ops/cuda/kernels/exact.cuh>
#include <attnpack/ops/cuda/kernels/gradient_parts.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>
#include <attnpack/ops/cuda/kernels/tiles.cuh>

// Backward on tensor cores (FlashAttention-2, Dao 2023, section 3.1.2), with the formulas and the form of
// backward_exact.cuh. The owners of a block, 16 rows or keys per warp, gather from all the others that see them or that
// they see. No sum is shared between blocks; several may each have a part of the others. With X the owners and Y the
// others ([Q, dO] and [K, V], or the other way round), a step forms
//   S = X0 Y0^T,  dP = X1 Y1^T,  then from P and dS:  sum0 += dS Y0 (dQ or dK),  sum1 += P Y1 (dV).
namespace attnpack::cuda {

// The numbers of the others, for add_broken. An infinite query or key leaves NaN in its row's scores, so it brings NaN.
template <class S>
struct KeyNumber {
  KeyRows<S> rows;
  ATTNPACK_DEVICE float operator()(int64_t j, int c) const { return widen(rows(j)[c]) * 0; }
};
template <class S>
struct RowNumber {
  const AttentionParams* p;
  const S* base;  // of the sequence's first row
  Strides strides;
  int64_t kv_head;
  bool as_nan;
  ATTNPACK_DEVICE float operator()(int64_t index, int c) const {
    const int64_t group = group_size(*p, kv_head), head = group_head(*p, kv_head, index % group);
    const float x = widen(base[head * strides.head + index / group * strides.row + c]);
    return as_nan ? x * 0 : x;
  }
};

template <class S, Gradient Of, int Width>
class BackwardTile {
 public:
  static constexpr int kWarps = 4, kThreads = kWarp * kWarps;
  static constexpr int kTileOwners = static_cast<int>(kBackwardOwners);
  static constexpr int kStep = static_cast<int>(backward_step(Width));  // others per step
  static constexpr bool kOwnsRows = Of == Gradient::kQuery;
  static constexpr bool kOfValues = Of == Gradient::kValue || Of == Gradient::kKeyAndValue;
  static constexpr bool kOfScores = Of != Gradient::kValue;
  // The owners' fragments stay in registers where there is room for them beside the sums.
  static constexpr bool kKeep = Width <= 64 && kOwnsRows;

  static constexpr int kTableRows = kOwnsRows ? kTileOwners : kStep;
  static constexpr int kSumStride = Width + 8;  // as in forward_mma.cuh
  struct RowTable {
    Row row[kTableRows];
    RowRule<float> rule[kTableRows];
    float lse[kTableRows], delta[kTableRows];
  };
  struct Shared {
    union {
      struct {
        S owner[2][kTileOwners * Width], other[2][2][kStep * Width];  // [stage]
      };
      float sum[kTileOwners * kSumStride];
    };
    RowTable rows[kOwnsRows ? 1 : 2];
  };

  ATTNPACK_DEVICE BackwardTile(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace,
                               int64_t block, Shared& shared)
      : bp_(bp),
        p_(bp.forward),
        plan_(plan),
        workspace_(workspace),
        shared_(shared),
        lane_(thread_id() % kWarp),
        warp_(thread_id() / kWarp) {
    const OwnersPlace at = place_of_owners(p_, plan, Of, kTileOwners, block);
    b_ = at.batch;
    kv_head_ = at.kv_head;
    part_ = at.part;
    first_ = at.first;
    sequence_ = at.sequence;
    const Range keys = attnpack::keys_of(p_, sequence_);
    first_key_ = static_cast<int32_t>(keys.begin);
    const int64_t left = (kOwnsRows ? count_head_rows(p_, sequence_, kv_head_) : keys.count()) - first_;
    count_ = left < kTileOwners ? static_cast<int>(left) : kTileOwners;
    others_ = kOwnsRows ? hull(p_, sequence_, kv_head_, first_, kTileOwners)
                        : rows_that_see(p_, sequence_, kv_head_, {first_, first_ + kTileOwners});
    others_ = others_of_part(others_, others_.begin / kStep * kStep, kStep, plan.of(Of).parts, part_);
  }

  ATTNPACK_DEVICE void compute_gradients() {
    if (count_ <= 0) return;
    bool cleaned = false;
    while (any_in_block(gather_gradients(cleaned)) && !cleaned) cleaned = true;
  }

 private:
  static constexpr int kBlocks = kStep / 8;
  using Products = float[kBlocks][4];
  using Sums = float[Width / 8][4];

  // Returns whether this thread wrote NaN or Inf. cleaned: the operands are cleaned of NaN and Inf, which an excluded
  // pair would bring in as 0 * NaN (write_tile in partial.cuh says why).
  ATTNPACK_DEVICE bool gather_gradients(bool cleaned) {
    load_owners();
    clear_sums(sum_);
    clear_sums(value_sum_);
    stream_steps<kStep>(
        others_, [&](int64_t begin, int stage) { load_others(begin, stage); },
        [&](int64_t begin, int stage) {
          Products s = {}, g = {};
          multiply_operands(0, stage, s);
          if constexpr (kOfScores) multiply_operands(1, stage, g);
          compute_pair_weights(begin, stage, s, g);
          if (cleaned) {
            sync_block();
            clean_tile<2 * kStep * Width, kThreads>(shared_.other[stage][0]);
            sync_block();
          }
          if constexpr (kOfScores) add_weighted_operand(g, shared_.other[stage][0], sum_);
          if constexpr (kOfValues) add_weighted_operand(s, shared_.other[stage][1], value_sum_);
        });
    const float scale = static_cast<float>(p_.scale);
    bool broken = false;
    if constexpr (kOwnsRows)
      return write_gradient(sum_, scale, rows_of(bp_.grad_query, bp_.grad_query_strides), p_.head_dim, cleaned);
    if constexpr (kOfScores)
      broken |= write_gradient(sum_, scale, keys_of(bp_.grad_key, bp_.grad_key_strides, first_), p_.head_dim, cleaned);
    if constexpr (kOfValues)
      broken |= write_gradient(value_sum_, 1.f, keys_of(bp_.grad_value, bp_.grad_value_strides, first_), p_.v_head_dim,
                               cleaned, true);
    return broken;
  }

  template <class T>
  ATTNPACK_DEVICE static void clear_sums(T& sums) {
#pragma unroll
    for (auto& block : sums)
#pragma unroll
      for (float& x : block) x = 0;
  }

  // The tensor's rows that the table lists.
  ATTNPACK_DEVICE QueryRows<S> rows_of(const void* base, const Strides& strides, int stage = 0) const {
    return query_rows<S>(base, strides, b_, shared_.rows[stage].row);
  }
  ATTNPACK_DEVICE KeyRows<S> keys_of(const void* base, const Strides& strides, int64_t begin) const {
    return key_rows<S>(base, strides, b_, kv_head_, first_key_ + begin);
  }

  ATTNPACK_DEVICE void fill_table(RowTable& table, int64_t first) {
    constexpr int kCount = kOwnsRows ? kTileOwners : kStep;
    fill_rows(p_, sequence_, kv_head_, first, kCount, table.row);
    const int i = thread_id();
    if (i < kCount) {
      const int64_t at = (b_ * p_.num_heads + table.row[i].head) * p_.q_len + table.row[i].query;
      table.rule[i] = row_rule<float>(p_, b_, table.row[i]);
      table.lse[i] = static_cast<const float*>(p_.lse)[at];
      table.delta[i] = static_cast<const float*>(bp_.delta)[at];
    }
  }

  template <int Count, class First, class Second>
  ATTNPACK_DEVICE void copy_pair(S* first, S* second, const First& from, const Second& from_second, int count) {
    copy_tile<Count, Width, kThreads>(first, from, count, static_cast<int>(p_.head_dim), static_cast<const S*>(p_.key));
    copy_tile<Count, Width, kThreads>(second, from_second, count, static_cast<int>(p_.v_head_dim),
                                      static_cast<const S*>(p_.key));
  }

  ATTNPACK_DEVICE void load_owners() {
    S *x = shared_.owner[0], *y = shared_.owner[1];
    if constexpr (kOwnsRows) {
      fill_table(shared_.rows[0], first_);
      copy_pair<kTileOwners>(x, y, rows_of(p_.query, p_.query_strides), rows_of(bp_.grad_out, bp_.grad_out_strides),
                             count_);
    } else {
      copy_pair<kTileOwners>(x, y, keys_of(p_.key, p_.key_strides, first_), keys_of(p_.value, p_.value_strides, first_),
                             count_);
    }
    copy_async_commit();
    if constexpr (kKeep) {
      copy_async_wait<0>();
      sync_block();
#pragma unroll
      for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int k = 0; k < Width / 16; ++k) owner_fragment(which, k, owner_[which][k]);
    }
  }

  ATTNPACK_DEVICE void load_others(int64_t begin, int stage) {
    S *x = shared_.other[stage][0], *y = shared_.other[stage][1];
    const int64_t left = others_.end - begin;
    const int count = left < kStep ? static_cast<int>(left) : kStep;
    if constexpr (kOwnsRows) {
      copy_pair<kStep>(x, y, keys_of(p_.key, p_.key_strides, begin), keys_of(p_.value, p_.value_strides, begin), count);
    } else {
      fill_table(shared_.rows[stage], begin);
      copy_pair<kStep>(x, y, rows_of(p_.query, p_.query_strides, stage),
                       rows_of(bp_.grad_out, bp_.grad_out_strides, stage), count);
    }
  }

  ATTNPACK_DEVICE void owner_fragment(int which, int k, uint32_t (&to)[4]) {
    const Place at = lane_for_a(lane_);
    load_matrices(to, shared_.owner[which] + swizzled_offset(16 * warp_ + at.row, 2 * k + at.column, Width));
  }

  // out [owner, other] += X[which] Y[which]^T for this warp's owners.
  ATTNPACK_DEVICE void multiply_operands(int which, int stage, Products& out) {
    const S* other = shared_.other[stage][which];
    const Place at = lane_for_b(lane_);
    // If the fragments are not kept, the loop is hardly unrolled: its addresses would fill the registers.
    [[maybe_unused]] constexpr int kUnroll = kKeep ? Width / 16 : 2;
#pragma unroll kUnroll
    for (int k = 0; k < Width / 16; ++k) {
      uint32_t (&a)[4] = owner_[which][kKeep ? k : 0];
      if constexpr (!kKeep) owner_fragment(which, k, a);
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) {
        uint32_t b[4];
        load_matrices(b, other + swizzled_offset(8 * j + at.row, 2 * k + at.column, Width));
        multiply_add<S>(out[j], a, b[0], b[1]);
        multiply_add<S>(out[j + 1], a, b[2], b[3]);
      }
    }
  }

  // Turns S into P with dropout, and dP into dS / scale. Excluded pairs become zeros, whatever their products are.
  ATTNPACK_DEVICE void compute_pair_weights(int64_t begin, int stage, Products& s, Products& g) {
    const RowTable& rows = shared_.rows[kOwnsRows ? 0 : stage];
    const Range keys = kOwnsRows ? Range{begin, begin + kStep} : Range{first_, first_ + kTileOwners};
    const Row &lowest = rows.row[0], &highest = rows.row[(kOwnsRows ? kTileOwners : kStep) - 1];
    const bool plain = only_scaled(p_);
    // The ranges of later rows never begin or end earlier. A row past the last one ends at 0.
    const bool inside = plain && lowest.end >= keys.end && highest.end >= keys.end && highest.begin <= keys.begin;
    const float scale = plain ? static_cast<float>(p_.scale) : 1.f, kept_factor = static_cast<float>(p_.kept_factor);
    const ScoreRule<float> rule = score_rule<float>(p_);
    const uint64_t seed = p_.dropout_p > 0 ? seed_of(p_) : 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Place at = place_in_c(lane_, i);
        const int owner = 16 * warp_ + at.row, other = 8 * j + at.column, r = kOwnsRows ? owner : other;
        const int64_t key = kOwnsRows ? begin + other : first_ + owner;
        float score = s[j][i], slope = 1;
        if (!inside) {
          const Row& row = rows.row[r];
          if (plain)
            score = key >= row.begin && key < row.end ? score : -infinity<float>();
          else
            score = finish_score(p_, rule, rows.rule[r], row, key, score, &slope);
        }
        const bool seen = score != -infinity<float>();
        const float probability = seen ? power_of_two(bounded_exponent(score * scale - rows.lse[r]) * kLog2E) : 0.f;
        float kept = 1;
        if (p_.dropout_p > 0)
          kept = dropped_at(p_, seed, first_place(p_, b_, rows.row[r].head, rows.row[r].query) + key) ? 0 : kept_factor;
        s[j][i] = probability * kept;
        if constexpr (kOfScores) {
          const float gradient = seen ? probability * (kept * g[j][i] - rows.delta[r]) : 0.f;
          if constexpr (kOwnsRows)
            if (bp_.grad_scores && seen) {
              const int64_t at_row = (b_ * p_.num_heads + rows.row[r].head) * p_.q_len + rows.row[r].query;
              static_cast<float*>(bp_.grad_scores)[at_row * p_.kv_len + key] = gradient;
            }
          g[j][i] = gradient * slope;
        }
      }
    sync_warp();
  }

  // sum += weight Y. The fragments C that the products left are the fragments A of this product.
  ATTNPACK_DEVICE void add_weighted_operand(const Products& weight, const S* other, Sums& sum) {
    const Place at = lane_for_b_transposed(lane_);
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      const uint32_t a[4] = {pack<S>(weight[j][0], weight[j][1]), pack<S>(weight[j][2], weight[j][3]),
                             pack<S>(weight[j + 1][0], weight[j + 1][1]), pack<S>(weight[j + 1][2], weight[j + 1][3])};
#pragma unroll
      for (int d = 0; d < Width / 8; d += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, other + swizzled_offset(8 * j + at.row, d + at.column, Width));
        multiply_add<S>(sum[d], a, b[0], b[1]);
        multiply_add<S>(sum[d + 1], a, b[2], b[3]);
      }
    }
  }

  // Writes factor * sum of this warp's owners, through shared memory, so that rows are written whole.
  template <class Out>
  ATTNPACK_DEVICE bool write_gradient(const Sums& sum, float factor, const Out& out, int64_t width, bool cleaned,
                                      bool of_values = false) {
    sync_warp();
#pragma unroll
    for (int d = 0; d < Width / 8; ++d)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_pair(shared_.sum + (16 * warp_ + lane_ / 4 + 8 * h) * kSumStride + 8 * d + lane_ % 4 * 2,
                   sum[d][2 * h] * factor, sum[d][2 * h + 1] * factor);
    sync_warp();
    const int end = 16 * warp_ + 16 < count_ ? 16 * warp_ + 16 : count_;
    if (cleaned && others_.begin < others_.end) {
      const BrokenOwners owners{16 * warp_, 1, end, static_cast<int>(width)};
      if constexpr (kOwnsRows) {
        add_broken(shared_.sum, kSumStride, owners, others_, KeyNumber<S>{keys_of(p_.key, p_.key_strides, 0)},
                   RowSeesKey{&p_, b_, shared_.rows[0].row});
      } else {
        const Strides& strides = of_values ? bp_.grad_out_strides : p_.query_strides;
        const S* base = static_cast<const S*>(of_values ? bp_.grad_out : p_.query) + b_ * strides.batch +
                        queries_of(p_, sequence_).begin * strides.row;
        add_broken(shared_.sum, kSumStride, owners, others_, RowNumber<S>{&p_, base, strides, kv_head_, !of_values},
                   KeySeenByRow{&p_, sequence_, kv_head_, first_});
      }
    }
    const auto write = [&](const auto& to) {
      bool broken = false;
      for (int owner = 16 * warp_; owner < end; ++owner)
        for (int64_t c = lane_; c < width; c += kWarp) {
          const float x = shared_.sum[owner * kSumStride + c];
          broken |= !is_finite(x);
          narrow(x, to(owner) + c);
        }
      return broken;
    };
    if (plan_.of(Of).parts == 1) return write([&](int owner) { return const_cast<S*>(out(owner)); });
    const OwnersPlace at{static_cast<int32_t>(b_), static_cast<int32_t>(kv_head_), part_, first_, sequence_};
    return write(partial_rows(p_, plan_, Of, workspace_, at, of_values ? p_.head_dim : 0));
  }

  const AttentionBackwardParams& bp_;
  const AttentionParams& p_;
  const BackwardPlan& plan_;
  void* const workspace_;
  Shared& shared_;
  const int lane_, warp_;
  int count_;  // how many owners there are
  int32_t part_, sequence_, first_key_;
  int64_t b_, kv_head_, first_;
  Range others_;
  uint32_t owner_[2][kKeep ? Width / 16 : 1][4];
  Sums sum_, value_sum_;
};

template <class S, Gradient Of, int Width>
ATTNPACK_DEVICE void backward_mma_block(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace,
                                        int64_t block, void* shared) {
  using Tile = BackwardTile<S, Of, Width>;
  Tile(bp, plan, workspace, block, *static_cast<typename Tile::Shared*>(shared)).compute_gradients();
}

}  // namespace attnpack::cuda
