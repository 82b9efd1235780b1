#pragma once

#ifdef __CUDACC__
#include <attnpack/ops/cuda/kernels/launch.cuh>
#endif
#include <attnpack/ops/cuda/kernels/key_source.cuh>
#include <attnpack/ops/cuda/kernels/partial.cuh>
#include <attnpack/ops/cuda/kernels/tiles.cuh>

// Forward on tensor cores (FlashAttention-2, Dao 2023): a block of four warps holds a tile of query rows and goes
// through the keys, which arrive by asynchronous copies ahead of their use. key_source.cuh says from where. Prefill:
// each warp has 32 rows of its own, 16 where they are wide, and all keys of a step. Decode: all warps have the same 16
// rows, and each has a quarter of the keys; their results are joined at the end.
namespace attnpack::cuda {

template <class S, int RowWarps, int KeyWarps, int Width, KeysIn From = KeysIn::kTensor, Scores Kind = Scores::kAny>
class ForwardTile {
 public:
  static constexpr int kThreads = kWarp * RowWarps * KeyWarps;
  // Tiles of 16 rows per warp. Each byte of a key or value that a warp reads from shared memory serves all of them.
  static constexpr int kTiles =
      KeyWarps > 1 ? 1 : static_cast<int>(prefill_rows(Width, Kind == Scores::kPlain)) / (16 * RowWarps);
  static constexpr int kRows = 16 * kTiles * RowWarps;
  static constexpr int kKeys = Width <= 128 || KeyWarps > 1 ? 64 : 32;  // keys per step
  static constexpr int kStages = KeyWarps > 1 ? 2 : 1;                  // steps that shared memory holds
  static constexpr int kWarpKeys = kKeys / KeyWarps;
  static constexpr int kBits = From == KeysIn::kBytes8 ? 8 : From == KeysIn::kBytes4 ? 4 : 0;
  using Source = std::conditional_t<kBits == 0, NumberSource<S, kKeys, Width, kThreads, kStages, From>,
                                    QuantizedSource<S, kKeys, Width, kThreads, kBits == 0 ? 8 : kBits>>;
  // Query fragments stay in registers where there is room for them beside the sums.
  static constexpr bool kKeepQuery = kTiles * Width <= 128;
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
      } end;
    };
    Row rows[kRows];
    Unit unit;  // not in registers, which are short in the loop over the keys
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
  static constexpr int kBlocks = kWarpKeys / 8;
  using Products = float[kTiles][kBlocks][4];

  // Returns whether this thread wrote NaN or Inf.
  ATTNPACK_DEVICE bool attend(int count, bool cleaned) {
    fill_rows(p_, u_.sequence, u_.kv_head, u_.first, kRows, shared_.rows);
    load_query(count);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int d = 0; d < Width / 8; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[t][d][i] = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max_[t][h] = -infinity<float>();
        sum_[t][h] = 0;
      }
    }
    const bool has_rows = 16 * kTiles * row_warp_ < count;  // else this warp only helps to copy
    const auto clean_values = [&](int stage) {
      if (!cleaned) return;
      clean_tile<kKeys * Width, kThreads>(source_.value_tile(stage));
      sync_block();
    };
    Products s;
    if constexpr (kStages == 1) {
      stream_halves<kKeys>(
          u_.keys, [&](int64_t begin) { source_.load_keys(begin, 0); },
          [&](int64_t) {
            if (has_rows) multiply_keys(0, s);
          },
          [&](int64_t begin) { source_.load_values(begin, 0); },
          [&](int64_t begin) {
            clean_values(0);
            if (has_rows) add_values(begin, 0, s);
          });
    } else {
      stream_steps<kKeys>(
          u_.keys, [&](int64_t begin, int stage) { source_.load(begin, stage); },
          [&](int64_t begin, int stage) {
            source_.prepare(begin, stage);
            clean_values(stage);
            multiply_keys(stage, s);
            add_values(begin, stage, s);
          });
    }
    return write_outputs(count, cleaned);
  }

  ATTNPACK_DEVICE void load_query(int count) {
    copy_query<kRows, Width, kThreads>(shared_.query, p_, u_, count);
    copy_async_commit();
    if constexpr (kKeepQuery) {
      copy_async_wait<0>();
      sync_block();
#pragma unroll
      for (int k = 0; k < Width / 16; ++k) query_fragments(k, query_[k]);
    }
  }

  ATTNPACK_DEVICE void query_fragments(int k, uint32_t (&to)[kTiles][4]) {
    const Place at = lane_for_a(lane_);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      load_matrices(to[t],
                    shared_.query + 16 * t * Width +
                        swizzled_further(swizzled_offset(16 * kTiles * row_warp_ + at.row, at.column, Width), 2 * k));
  }

  // s = Q K^T
  ATTNPACK_DEVICE void multiply_keys(int stage, Products& s) {
    const int first = key_warp_ * kWarpKeys;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][j][i] = 0;
    // The loop is hardly unrolled for wide rows, where its addresses would fill the registers.
    [[maybe_unused]] constexpr int kUnroll = Width <= 128 ? Width / 16 : 2;
    const Place at = lane_for_b(lane_);
    const S* from = source_.key_tile(stage) + first * Width;
    const int offset = swizzled_offset(at.row, at.column, Width);
    uint32_t b[2][4];  // those of the next product arrive while this one runs
    load_matrices(b[0], from + offset);
    if constexpr (!kKeepQuery) query_fragments(0, query_[0]);
#pragma unroll kUnroll
    for (int k = 0; k < Width / 16; ++k) {
      auto& query = query_[kKeepQuery ? k : k % 2];
      if constexpr (!kKeepQuery)
        if (k + 1 < Width / 16) query_fragments(k + 1, query_[(k + 1) % 2]);
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) {
        const int now = (k * (kBlocks / 2) + j / 2) % 2;
        if (j + 2 < kBlocks)
          load_matrices(b[1 - now], from + 8 * (j + 2) * Width + swizzled_further(offset, 2 * k));
        else if (k + 1 < Width / 16)
          load_matrices(b[1 - now], from + swizzled_further(offset, 2 * (k + 1)));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply_add<S>(s[t][j], query[t], b[now][0], b[now][1]);
          multiply_add<S>(s[t][j + 1], query[t], b[now][2], b[now][3]);
        }
      }
    }
  }

  // Turns s into weights P, and adds P V to the output.
  ATTNPACK_DEVICE void add_values(int64_t begin, int stage, Products& s) {
    const int first = key_warp_ * kWarpKeys;
    begin += first;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      // Read again in each step, as the unit is.
      const LaneRows rows = lane_rows_of(shared_.rows + 16 * (kTiles * row_warp_ + t));
      finish_scores<Kind>(p_, u_.b, rows, begin, s[t]);
      apply_softmax(t, s[t]);
      if constexpr (Kind == Scores::kAny)
        if (p_.dropout_p > 0) drop_weights(p_, u_.b, rows, begin, s[t]);
    }
    sync_warp();
    const Place at = lane_for_b_transposed(lane_);
    const S* from = source_.value_tile(stage) + first * Width;
    const int offset = swizzled_offset(at.row, at.column, Width);
    uint32_t b[2][4];
    load_matrices_transposed(b[0], from + offset);
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      // The fragment C that the first product left is the fragment A of the second.
      uint32_t a[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[t][i] = pack<S>(s[t][j + i / 2][2 * (i % 2)], s[t][j + i / 2][2 * (i % 2) + 1]);
#pragma unroll
      for (int d = 0; d < Width / 8; d += 2) {
        const int now = d / 2 % 2;
        if (d + 2 < Width / 8)
          load_matrices_transposed(b[1 - now], from + 8 * j * Width + swizzled_further(offset, d + 2));
        else if (j + 2 < kBlocks)
          load_matrices_transposed(b[1 - now], from + 8 * (j + 2) * Width + offset);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply_add<S>(out_[t][d], a[t], b[now][0], b[now][1]);
          multiply_add<S>(out_[t][d + 1], a[t], b[now][2], b[now][3]);
        }
      }
    }
  }

  // Turns a tile's s into weights, updates max and sum, and rescales the output so far to the new maximum.
  ATTNPACK_DEVICE void apply_softmax(int tile, float (&s)[kBlocks][4]) {
    float factor[2];
    raise_softmax<Kind>(p_, s, max_[tile], sum_[tile], factor);
    float (&out)[Width / 8][4] = out_[tile];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (factor[h] != 1)
#pragma unroll
        for (int d = 0; d < Width / 8; ++d) {
          out[d][2 * h] *= factor[h];
          out[d][2 * h + 1] *= factor[h];
        }
  }

  // Goes through shared memory: the warps' parts of a row are joined in their order, and rows are written whole.
  ATTNPACK_DEVICE bool write_outputs(int count, bool cleaned) {
    auto& end = shared_.end;
    float* part = end.out[key_warp_];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = row_sum(sum_[t][h]);
        const int row = 16 * (kTiles * row_warp_ + t) + lane_ / 4 + 8 * h;
        if (lane_ % 4 == 0) {
          end.max[key_warp_][row] = max_[t][h];
          end.sum[key_warp_][row] = sum;
        }
#pragma unroll
        for (int d = 0; d < Width / 8; ++d)
          store_pair(part + row * kOutStride + 8 * d + lane_ % 4 * 2, out_[t][d][2 * h], out_[t][d][2 * h + 1]);
      }
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
      return Softmax<float>{top * (multiplier_of<Kind>(p_) / kLog2E), sum};
    };
    if (!cleaned) return write_tile<S>(p_, plan_, workspace_, u_, count, shared_.rows, kThreads, state, join);
    // The joined rows take the place of the first warp's part, so that NaN and Inf are added to them.
    const int warp = thread_id() / kWarp;
    for (int r = warp; r < count; r += kThreads / kWarp) {
      const JoinedRow row = join(r);
      for (int c = lane_; c < p_.v_head_dim; c += kWarp) end.out[0][r * kOutStride + c] = row(c);
    }
    add_broken(end.out[0], kOutStride, {warp, kThreads / kWarp, count, static_cast<int>(p_.v_head_dim)}, u_.keys,
               Source::number(p_, u_), RowSeesKey{&p_, u_.b, shared_.rows});
    return write_tile<S>(p_, plan_, workspace_, u_, count, shared_.rows, kThreads, state,
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
    const float multiplier = multiplier_of<Kind>(p_);
#pragma unroll
    for (int w = 0; w < KeyWarps; ++w) {
      const float maximum = shared_.end.max[w][row];
      factor[w] = maximum == top ? 1.f : power_of_two((maximum - top) * multiplier);
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
  uint32_t query_[kKeepQuery ? Width / 16 : 2][kTiles][4];
  float out_[kTiles][Width / 8][4], max_[kTiles][2], sum_[kTiles][2];
};

// Under rules, prefill reads keys in pages too.
template <class S, int Width, Scores Kind>
using PrefillTile = ForwardTile<S, 4, 1, Width, Kind == Scores::kPlain ? KeysIn::kTensor : KeysIn::kEither, Kind>;

template <class Tile>
ATTNPACK_DEVICE void forward_mma_block(const AttentionParams& p, const ForwardPlan& plan, void* workspace,
                                       int64_t block, void* shared) {
  auto& tile = *static_cast<typename Tile::Shared*>(shared);
  if (thread_id() == 0) tile.unit = unit_of(p, plan, block);
  sync_block();
  Tile(p, plan, workspace, tile.unit, tile).compute_outputs();
}

#ifdef __CUDACC__

using MmaKernel = void(const AttentionParams, const ForwardPlan, void* workspace);

constexpr int kDecodeKeyWarps = 4, kDecodeThreads = kWarp * kDecodeKeyWarps;

// Kernels::get<S, Width>(): the kernel for a storage type and padded head_dim; Kernels::Tile<S, Width>: its tile.
template <class Kernels>
const char* launch_forward(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                           void* stream) {
  return with_half_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto of_width = [&](auto width) {
      using Tile = typename Kernels::template Tile<S, decltype(width)::value>;
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
