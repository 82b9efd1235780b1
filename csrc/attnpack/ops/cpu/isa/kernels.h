#pragma once

#include <cstddef>

#include <attnpack/core/params.h>
#include <attnpack/core/quantized.h>
#include <attnpack/core/stored.h>

// The units of work of one instruction set. The result of a unit does not depend on other units, on the thread count or
// on the batch. So results are bitwise the same however units are handed out.
namespace attnpack {

// Whether memory that is read once passes L2 by, which leaves L2 to the data of the next layer (gain: PERFORMANCE.md).
// AMD's processors then find such memory in L3 the next time, others may not. So it does where pairs of bf16 are fast:
// of x86 these are AMD's processors.
extern const bool streams_past_l2;

// The rows of a kv head are all (query, member of the group) pairs that share it: row = query * group_size + member. So
// keys and values are read once per group, and neighbouring rows see almost the same keys.
struct Kernels {
  // Forward, many rows: up to most_tiles_together tiles of rows against all keys. scratch: prefill_scratch bytes, with
  // zeroed flags at the start.
  size_t (*prefill_scratch)(const AttentionParams&);
  void (*prefill)(const AttentionParams&, int64_t b, int64_t kv_head, Range rows, void* scratch);

  // Forward, few rows: all rows of some kv heads, at most heads_in_turn, against a range of keys, each read from memory
  // once. partials: for each of the heads, where max, sum and v_head_dim values per row go.
  size_t (*decode_scratch)(const AttentionParams&);
  void (*decode)(const AttentionParams&, int64_t b, Range kv_heads, Range keys, void* const* partials, void* scratch);
  // Joins the partial results of some rows of a kv head into out and lse, in the order of the ranges. partials: [count,
  // all rows of the kv head, v_head_dim + 2].
  void (*merge)(const AttentionParams&, int64_t b, int64_t kv_head, Range rows, const void* partials, int64_t count);

  // Backward: the gradients of a block of keys, and the block's part of the gradients of all rows. The units of a kv
  // head must begin in the order of their keys: each waits, tile by tile, for the units before it.
  size_t (*backward_scratch)(const AttentionParams&);
  void (*backward)(const AttentionBackwardParams&, int64_t b, int64_t kv_head, Range keys, void* scratch);

  // A range of outputs of a linear layer for few rows. scratch has zeroed flags at the start, and is kept for the next
  // range of a layer that reads the same rows.
  size_t (*linear_scratch)(const LinearParams&);
  void (*linear_rows)(const LinearParams&, Range outputs, void* scratch);

  // A linear layer on stored weights. round_input comes first, for all rows; a range that is not the last one of a call
  // has kStoredRows rows, and kStoredOutputs outputs or a multiple of that.
  bool (*has_byte_products)();  // whether rounded inputs are faster than widened weights
  void (*round_input)(const StoredLinearParams&, Range rows);
  size_t (*stored_linear_scratch)(const StoredLinearParams&);
  void (*stored_linear_rows)(const StoredLinearParams&, Range rows, Range outputs, void* scratch);
  void (*widen_stored_rows)(const StoredRowsParams&, Range rows);

  // A value head of a sequence of linear attention, and the gradients of the value heads of a key head.
  size_t (*linear_attention_scratch)(const LinearAttentionParams&);
  void (*linear_attention)(const LinearAttentionParams&, int64_t sequence, int64_t first_head, void* scratch);
  size_t (*linear_attention_backward_scratch)(const LinearAttentionBackwardParams&);
  void (*linear_attention_backward)(const LinearAttentionBackwardParams&, int64_t sequence, int64_t key_head,
                                    void* scratch);

  // Some tokens and channels of a sequence of a causal convolution; the range that ends with the sequence writes the
  // state. And the gradients of some channels of a sequence.
  size_t (*causal_conv1d_scratch)(const CausalConv1dParams&);
  void (*causal_conv1d)(const CausalConv1dParams&, int64_t sequence, Range tokens, Range channels, void* scratch);
  size_t (*causal_conv1d_backward_scratch)(const CausalConv1dBackwardParams&);
  void (*causal_conv1d_backward)(const CausalConv1dBackwardParams&, int64_t sequence, Range channels, void* scratch);

  void (*rms_norm_rows)(const RmsNormParams&, Range rows);
  void (*swiglu)(const SwigluParams&, Range numbers);

  // scratch: a float for each number of a row.
  void (*quantize_rows)(const QuantizeParams&, Range rows, void* scratch);
  void (*dequantize_rows)(const QuantizeParams&, Range rows, void* scratch);
  void (*rotate_rows)(const QuantizeParams&, Range rows);  // of floats, in place, as rows of 4 bits are rotated

  // For benchmarks. They write their results to sink, so that no compiler leaves the work out.
  double (*multiply_adds)(int64_t rounds, float* sink);
  double (*pair_multiply_adds)(int64_t rounds, float* sink);
  void (*read_through)(const float* data, int64_t count, float* sink);
};

// Most rows of a kv head that are one prefill tile. takes_whole_heads asks for the threads too: the bits stay the same.
constexpr int64_t kWholeHeadRows = 132;
// How work is cut. This depends only on the shapes of one sequence.
constexpr int64_t kTileQueryRows = 96;  // rows of a prefill or backward tile
constexpr int64_t kDecodeRows = 192;    // most rows of a kv head that stream the keys; packing the keys would cost more
constexpr int64_t kShortKeys = 512;     // most keys that are packed for fewer rows: for more than kShortRows,
constexpr int64_t kShortRows = 48;      // or for more than kFewKeysRows if there are at most kFewKeys keys
constexpr int64_t kFewKeys = 32, kFewKeysRows = 4;
constexpr int64_t kShortWidth = 256;   // and for heads of at most this head_dim + v_head_dim
constexpr int64_t kMergedRows = 8;     // rows whose partial results one unit joins
constexpr int64_t kPackedKeys = 8192;  // most keys of a head that stay packed in scratch between tiles

// How many tiles of a prefill may take each block of keys in turn. A block is then in the L2 cache for all but the
// first, and is packed once for all of them where blocks do not stay packed.
constexpr int64_t kTilesTogether = 8, kKeysOfOneTile = 4096;
inline int64_t most_tiles_together(const AttentionParams& p) { return p.kv_len > kKeysOfOneTile ? kTilesTogether : 1; }

// Into how many ranges the keys of a sequence are cut that sees `keys` keys (seen_keys); a decode unit streams one.
// Ranges are long, because the first range of a thread begins with reads that nothing has prefetched. But a long
// sequence has at least some 64 ranges in all its kv heads together, and more than two ranges are so many that 2 or 4
// threads get as many each.
inline int64_t key_ranges(const AttentionParams& p, int64_t keys) {
  const int64_t kv_heads = p.selected.given ? p.selected.num_kv_heads : p.num_kv_heads;
  const int64_t share = kv_heads * keys / 64 / 512 * 512, most = share < 512 ? 512 : share < 2048 ? share : 2048;
  int64_t ranges = keys > most ? (keys + most - 1) / most : 1;
  while (ranges > 2 && kv_heads * ranges % 4 != 0) ++ranges;
  return ranges;
}
// Where range number `range` of these begins, if the keys begin at 0. Ranges have about the same length.
constexpr int64_t kRangeStep = 64;
inline int64_t range_begin(int64_t keys, int64_t ranges, int64_t range) {
  return range < ranges ? (keys + kRangeStep - 1) / kRangeStep * range / ranges * kRangeStep : keys;
}

// How many kv heads may read the same range of keys in turn: several if their rows lie side by side, as in packed keys
// [tokens, heads, head_dim] or in pages that hold all heads.
constexpr int64_t kHeadsInTurn = 8;
inline int64_t heads_in_turn(const AttentionParams& p) {
  const auto side_by_side = [&](const Strides& s) { return s.head < (p.block_table ? s.batch : s.row); };
  if (p.quantized_bits || p.selected.given || !side_by_side(p.key_strides) || !side_by_side(p.value_strides)) return 1;
  return p.num_kv_heads < kHeadsInTurn ? p.num_kv_heads : kHeadsInTurn;
}

// How many keys a backward block has. With the rows of a tile and their sums they stay in an L2 cache of 1 MiB.
constexpr int64_t backward_block(int64_t head_dim, int64_t v_head_dim) {
  const int64_t width = head_dim + v_head_dim;
  return width <= 128 ? 256 : width <= 512 ? 128 : 64;
}
// Row width of grad_query_sums: whole panels of the matrix product in every instruction set.
constexpr int64_t sums_width(int64_t head_dim) { return (head_dim + 31) / 32 * 32; }

// How many tokens and channels a unit of a causal convolution has at most.
constexpr int64_t kConvTokens = 128, kConvChannels = 256;

#define ATTNPACK_DECLARE_ISA(isa)                                                                \
  namespace isa {                                                                                \
  size_t prefill_scratch(const AttentionParams&);                                                \
  void prefill(const AttentionParams&, int64_t, int64_t, Range, void*);                          \
  size_t decode_scratch(const AttentionParams&);                                                 \
  void decode(const AttentionParams&, int64_t, Range, Range, void* const*, void*);               \
  void merge(const AttentionParams&, int64_t, int64_t, Range, const void*, int64_t);             \
  size_t backward_scratch(const AttentionParams&);                                               \
  void backward(const AttentionBackwardParams&, int64_t, int64_t, Range, void*);                 \
  size_t linear_scratch(const LinearParams&);                                                    \
  void linear_rows(const LinearParams&, Range, void*);                                           \
  bool has_byte_products();                                                                      \
  void round_input(const StoredLinearParams&, Range);                                            \
  size_t stored_linear_scratch(const StoredLinearParams&);                                       \
  void stored_linear_rows(const StoredLinearParams&, Range, Range, void*);                       \
  void widen_stored_rows(const StoredRowsParams&, Range);                                        \
  size_t linear_attention_scratch(const LinearAttentionParams&);                                 \
  void linear_attention(const LinearAttentionParams&, int64_t, int64_t, void*);                  \
  size_t linear_attention_backward_scratch(const LinearAttentionBackwardParams&);                \
  void linear_attention_backward(const LinearAttentionBackwardParams&, int64_t, int64_t, void*); \
  size_t causal_conv1d_scratch(const CausalConv1dParams&);                                       \
  void causal_conv1d(const CausalConv1dParams&, int64_t, Range, Range, void*);                   \
  size_t causal_conv1d_backward_scratch(const CausalConv1dBackwardParams&);                      \
  void causal_conv1d_backward(const CausalConv1dBackwardParams&, int64_t, Range, void*);         \
  void rms_norm_rows(const RmsNormParams&, Range);                                               \
  void swiglu(const SwigluParams&, Range);                                                       \
  void quantize_rows(const QuantizeParams&, Range, void*);                                       \
  void dequantize_rows(const QuantizeParams&, Range, void*);                                     \
  void rotate_rows(const QuantizeParams&, Range);                                                \
  double multiply_adds(int64_t, float*);                                                         \
  double pair_multiply_adds(int64_t, float*);                                                    \
  void read_through(const float*, int64_t, float*);                                              \
  }
ATTNPACK_DECLARE_ISA(baseline)
#if defined(__x86_64__)
ATTNPACK_DECLARE_ISA(avx2)
ATTNPACK_DECLARE_ISA(avx512)
ATTNPACK_DECLARE_ISA(avx512_vnni)  // only what stored_linear.cpp defines
ATTNPACK_DECLARE_ISA(avx512_bf16)
ATTNPACK_DECLARE_ISA(avx512_bf16_emulated)
#elif defined(__aarch64__)
ATTNPACK_DECLARE_ISA(neon_dotprod)
ATTNPACK_DECLARE_ISA(neon_bf16)
#endif
#undef ATTNPACK_DECLARE_ISA

}  // namespace attnpack
