#pragma once

#ifdef __CUDACC__
#include <attnpack/ops/cuda/kernels/launch.cuh>
#endif
#include <attnpack/ops/cuda/kernels/key_source.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>
#include <attnpack/ops/cuda/kernels/tiles.cuh>

// Forward on tensor cores (FlashAttention-2, Dao 2023): a block of four warps holds a tile of query rows and goes
// through the keys, which arrive by asynchronous copies one step ahead. key_source.cuh says from where. Prefill: each
// warp has 16 rows of its own and all keys of a step. Decode: all warps have the same 16 rows, and each has a quarter
// of the keys; their results are joined at the end.
namespace attnpack::cuda {

enum class KeysIn { kTensor, kPages, kBytes8, kBytes4 };

template <class S, int RowWarps, int KeyWarps, int Width, KeysIn From = KeysIn::kTensor>
class ForwardTile {
 public:
  static constexpr int kThreads = kWarp * RowWarps * KeyWarps;
  static constexpr int kRows = 16 * RowWarps;
  static constexpr int kKeys = Width <= 128 || KeyWarps > 1 ? 64 : 32;  // keys per step
  static constexpr int kWarpKeys = kKeys / KeyWarps;
  static constexpr int kBits = From == KeysIn::kBytes8 ? 8 : From == KeysIn::kBytes4 ? 4 : 0;
  using Source = std::conditional_t<kBits == 0, NumberSource<S, kKeys, Width, kThreads, From == KeysIn::kPages>,
                                    QuantizedSource<S, kKeys, Width, kThreads, kBits == 0 ? 8 : kBits>>;
  // Query fragments stay in registers where there is room for them beside the sums.
  static constexpr bool kKeepQuery = Width <= 128;
  static constexpr int kOutStride = Width + 8;

  struct Shared {
    union {
      struct {
        S query[kRows * Width];
        typename Source::Shared keys;
      };
      struct {
        // Each warp's part of the result. With this stride the rows that a warp stores at once lie in different banks.
        float out[KeyWarps][kRows * kOutStride], max[KeyWarps][kRows], sum[KeyWarps][kRows];
        Row rows[kRows];
      } end;
    };
  };

  ATTNPACK_DEVICE ForwardTile(const AttentionParams& p, const ForwardPlan& plan, void* workspace, const Unit& u,
                              Shared& shared)
      : p_(p),
        plan_(plan),
        workspace_(workspace),
        u_(u),
        shared_(shared),
        source_(p, u, shared.keys),
        lane_(thread_id() % kWarp),
        row_warp_(thread_id() / kWarp % RowWarps),
        key_warp_(thread_id() / kWarp / RowWarps) {}

  ATTNPACK_DEVICE void compute_outputs() {
    attend_rows<kRows>(p_, u_, [&](int count, bool cleaned) { return attend(count, cleaned); });
  }

 private:
  // Returns whether this thread wrote NaN or Inf.
  ATTNPACK_DEVICE bool attend(int count, bool cleaned) {
    load_query(count);
    const LaneRows lane_rows = make_lane_rows(p_, u_.b, u_.kv_head, u_.first + 16 * row_warp_);
#pragma unroll
    for (int d = 0; d < Width / 8; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[d][i] = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max_[h] = -infinity<float>();
      sum_[h] = 0;
    }
    stream_steps<kKeys>(
        u_.keys, [&](int64_t begin, int stage) { source_.load(begin, stage); },
        [&](int64_t begin, int stage) {
          source_.prepare(begin, stage);
          if (cleaned) {
            clean_tile<kKeys * Width, kThreads>(source_.value_tile(stage));
            sync_block();
          }
          attend_step(lane_rows, begin, stage);
        });
    return write_outputs(count, cleaned);
  }

  ATTNPACK_DEVICE void load_query(int count) {
    copy_query<kRows, Width, kThreads>(shared_.query, p_, u_, count);
    copy_async_commit();
    if constexpr (kKeepQuery) {
      copy_async_wait<0>();
      sync_block();
#pragma unroll
      for (int k = 0; k < Width / 16; ++k) query_fragment(k, query_[k]);
    }
  }

  ATTNPACK_DEVICE void query_fragment(int k, uint32_t (&to)[4]) {
    const Place at = lane_for_a(lane_);
    load_matrices(to, shared_.query + swizzled_offset(16 * row_warp_ + at.row, 2 * k + at.column, Width));
  }

  ATTNPACK_DEVICE void attend_step(const LaneRows& lane_rows, int64_t begin, int stage) {
    constexpr int kBlocks = kWarpKeys / 8;
    const int first = key_warp_ * kWarpKeys;
    float s[kBlocks][4] = {};
    // If the query's fragments are not kept, the loop is hardly unrolled: its addresses would fill the registers.
    [[maybe_unused]] constexpr int kUnroll = kKeepQuery ? Width / 16 : 2;
#pragma unroll kUnroll
    for (int k = 0; k < Width / 16; ++k) {
      if constexpr (!kKeepQuery) query_fragment(k, query_[0]);
      const Place at = lane_for_b(lane_);
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) {
        uint32_t b[4];
        load_matrices(b, source_.key_tile(stage) + swizzled_offset(first + 8 * j + at.row, 2 * k + at.column, Width));
        multiply_add<S>(s[j], query_[kKeepQuery ? k : 0], b[0], b[1]);
        multiply_add<S>(s[j + 1], query_[kKeepQuery ? k : 0], b[2], b[3]);
      }
    }
    begin += first;
    finish_scores(p_, u_.b, lane_rows, begin, s);
    apply_softmax(s);
    if (p_.dropout_p > 0) drop_weights(p_, u_.b, lane_rows, begin, s);
    sync_warp();
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      // The fragment C that the first product left is the fragment A of the second.
      const uint32_t a[4] = {pack<S>(s[j][0], s[j][1]), pack<S>(s[j][2], s[j][3]), pack<S>(s[j + 1][0], s[j + 1][1]),
                             pack<S>(s[j + 1][2], s[j + 1][3])};
      const Place at = lane_for_b_transposed(lane_);
#pragma unroll
      for (int d = 0; d < Width / 8; d += 2) {
        uint32_t b[4];
        load_matrices_transposed(
            b, source_.value_tile(stage) + swizzled_offset(first + 8 * j + at.row, d + at.column, Width));
        multiply_add<S>(out_[d], a, b[0], b[1]);
        multiply_add<S>(out_[d + 1], a, b[2], b[3]);
      }
    }
  }

  // Turns s into weights, updates max and sum, and rescales the output so far to the new maximum.
  template <int Blocks>
  ATTNPACK_DEVICE void apply_softmax(float (&s)[Blocks][4]) {
    const float multiplier = multiplier_of(p_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = max_[h];
#pragma unroll
      for (int j = 0; j < Blocks; ++j) top = larger(top, larger(s[j][2 * h], s[j][2 * h + 1]));
      top = row_max(top);
      const float base = finite_max(top);
      const float factor = top == max_[h] ? 1.f : power_of_two((max_[h] - base) * multiplier);
      max_[h] = top;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < Blocks; ++j)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          s[j][i] = power_of_two((s[j][i] - base) * multiplier);
          sum += s[j][i];
        }
      sum_[h] = sum_[h] * factor + sum;  // this lane's part: the row's four lanes are added up at the end
      if (factor != 1)
#pragma unroll
        for (int d = 0; d < Width / 8; ++d) {
          out_[d][2 * h] *= factor;
          out_[d][2 * h + 1] *= factor;
        }
    }
  }

  // Goes through shared memory: the warps' parts of a row are joined in their order, and rows are written whole.
  ATTNPACK_DEVICE bool write_outputs(int count, bool cleaned) {
    auto& end = shared_.end;
    float* part = end.out[key_warp_];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] = row_sum(sum_[h]);
      const int row = 16 * row_warp_ + lane_ / 4 + 8 * h;
      if (lane_ % 4 == 0) {
        end.max[key_warp_][row] = max_[h];
        end.sum[key_warp_][row] = sum_[h];
      }
#pragma unroll
      for (int d = 0; d < Width / 8; ++d)
        store_pair(part + row * kOutStride + 8 * d + lane_ % 4 * 2, out_[d][2 * h], out_[d][2 * h + 1]);
    }
    if (thread_id() < kRows) end.rows[thread_id()] = make_row(p_, u_.b, u_.kv_head, u_.first + thread_id());
    sync_block();
    const auto join = [&](int r) {
      JoinedRow row{end.out[0] + r * kOutStride};
      factors(r, row.factor);
      return row;
    };
    const auto state = [&](int r) {
      float factor[KeyWarps], sum = 0;
      const float top = factors(r, factor);
#pragma unroll
      for (int w = 0; w < KeyWarps; ++w) sum += end.sum[w][r] * factor[w];
      return Softmax<float>{top * (multiplier_of(p_) / kLog2E), sum};
    };
    if (!cleaned) return write_tile<S>(p_, plan_, workspace_, u_, count, end.rows, kThreads, state, join);
    // The joined rows take the place of the first warp's part, so that NaN and Inf are added to them.
    const int warp = thread_id() / kWarp;
    for (int r = warp; r < count; r += kThreads / kWarp) {
      const JoinedRow row = join(r);
      for (int c = lane_; c < p_.v_head_dim; c += kWarp) end.out[0][r * kOutStride + c] = row(c);
    }
    add_broken(end.out[0], kOutStride, {warp, kThreads / kWarp, count, static_cast<int>(p_.v_head_dim)}, u_.keys,
               Source::number(p_, u_), RowSeesKey{&p_, u_.b, end.rows});
    return write_tile<S>(p_, plan_, workspace_, u_, count, end.rows, kThreads, state,
                         [&](int r) { return [&, r](int64_t c) { return end.out[0][r * kOutStride + c]; }; });
  }

  // A row's values: the sum of the warps' parts, each with its factor.
  struct JoinedRow {
    const float* first;
    float factor[KeyWarps];
    ATTNPACK_DEVICE float operator()(int64_t c) const {
      float sum = first[c] * factor[0];
#pragma unroll
      for (int w = 1; w < KeyWarps; ++w) sum += first[w * kRows * kOutStride + c] * factor[w];
      return sum;
    }
  };
  // The factors that bring the warps' parts of a row to one maximum, which is returned.
  ATTNPACK_DEVICE float factors(int row, float (&factor)[KeyWarps]) const {
    float top = shared_.end.max[0][row];
#pragma unroll
    for (int w = 1; w < KeyWarps; ++w) top = larger(top, shared_.end.max[w][row]);
    const float multiplier = multiplier_of(p_);
#pragma unroll
    for (int w = 0; w < KeyWarps; ++w) {
      const float own = shared_.end.max[w][row];
      factor[w] = own == top ? 1.f : power_of_two((own - top) * multiplier);
    }
    return top;
  }

  const AttentionParams& p_;
  const ForwardPlan& plan_;
  void* workspace_;
  const Unit& u_;
  Shared& shared_;
  Source source_;
  const int lane_, row_warp_, key_warp_;
  uint32_t query_[kKeepQuery ? Width / 16 : 1][4];
  float out_[Width / 8][4], max_[2], sum_[2];
};

template <class S, int RowWarps, int KeyWarps, int Width, KeysIn From = KeysIn::kTensor>
ATTNPACK_DEVICE void forward_mma_block(const AttentionParams& p, const ForwardPlan& plan, void* workspace,
                                       int64_t block, void* shared) {
  using Tile = ForwardTile<S, RowWarps, KeyWarps, Width, From>;
  const Unit u = unit_of(p, plan, block);
  Tile(p, plan, workspace, u, *static_cast<typename Tile::Shared*>(shared)).compute_outputs();
}

#ifdef __CUDACC__

using MmaKernel = void(const AttentionParams, const ForwardPlan, void* workspace);

constexpr int kDecodeKeyWarps = 4, kDecodeThreads = kWarp * kDecodeKeyWarps;

// Kernels::get<S, Width>(): the kernel of RowWarps x KeyWarps warps for a storage type and padded head_dim.
template <class Kernels, int RowWarps, int KeyWarps, KeysIn From = KeysIn::kTensor>
const char* launch_forward(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                           void* stream) {
  return with_half_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto of_width = [&](auto width) {
      using Tile = ForwardTile<S, RowWarps, KeyWarps, decltype(width)::value, From>;
      constexpr MmaKernel* kernel = Kernels::template get<S, decltype(width)::value>();
      return launch(kernel, plan.blocks, Tile::kThreads, sizeof(typename Tile::Shared), device, stream, p, plan,
                    workspace);
    };
    return plan.width == 64    ? of_width(std::integral_constant<int, 64>{})
           : plan.width == 128 ? of_width(std::integral_constant<int, 128>{})
                               : of_width(std::integral_constant<int, 256>{});
  });
}

#endif

}  // namespace attnpack::cuda
