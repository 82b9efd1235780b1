#pragma once

#include <cstdint>

#include <attnpack/core/params.h>
#include <attnpack/core/quantized.h>
#include <attnpack/ops/cuda/kernels/index.h>
#include <attnpack/ops/cuda/kernels/mask_plan.h>

// Decides which kernel takes a call, and how the call is cut into blocks, from only the shapes, layout and device.
namespace attnpack::cuda {

// Whether scores need a scale above 0 and nothing else but the row's range, and the mask if there is one.
ATTNPACK_HD static inline bool scaled_or_masked(const AttentionParams& p) {
  return p.softcap == 0 && !p.alibi_slopes && p.scale > 0;
}
ATTNPACK_HD static inline bool only_scaled(const AttentionParams& p) { return scaled_or_masked(p) && !p.mask; }
// Without rules, and with keys in one tensor.
ATTNPACK_HD static inline bool is_plain(const AttentionParams& p) {
  return only_scaled(p) && p.dropout_p == 0 && !p.block_table;
}
// Plain, but for a bool mask that can be stored as bits.
static inline bool is_masked(const AttentionParams& p) {
  return scaled_or_masked(p) && p.mask && p.mask_dtype == DType::kBool && p.dropout_p == 0 && fits_mask_bits(p);
}

// Whether rows see different numbers of keys.
ATTNPACK_HD static inline bool has_ranges(const AttentionParams& p) {
  return p.causal || p.window_left >= 0 || p.window_right >= 0;
}

enum class ForwardKernel : int32_t { kExact, kPrefill, kDecode, kLatent, kSm90, kLatentSm90 };

struct ForwardPlan {
  ForwardKernel kernel;
  // Head dims that the tensor-core kernel has room for: 64, 128, 256; latent 576; sm90/ also 192 with values of 128.
  int32_t width;
  int64_t most_group;     // size of the largest group of query heads that share a kv head
  int64_t rows;           // most rows of a kv head: queries times members of the group
  int64_t tile_rows;      // rows of a block
  int64_t tiles;          // tiles of a kv head's rows
  int64_t column_blocks;  // exact kernel: blocks that share the columns of the values
  int64_t parts;          // of the keys
  int64_t section;        // heads of a section, each part counted as a head (place_of_block)
  int64_t blocks;
  int64_t workspace_bytes;  // memory for the partial results, if there are several parts, and for the mask's bits
  MaskBits mask;            // sm90/, if the call is_masked
  MaskLists lists;          // of its tiles
};

constexpr int64_t kExactRows = 16, kDecodeTileRows = 16, kExactColumns = 128;
// Rows of a block. More of them read each key less often, but need registers, as the rules of scores do too.
constexpr int64_t prefill_rows(int64_t width, bool plain) { return plain && width <= 128 ? 128 : 64; }
constexpr int64_t kLatentTileRows = 64, kSm90TileRows = 128, kSm90MostTileRows = 192;
constexpr int64_t kLatentHeadDim = 576, kLatentValueDim = 512;  // DeepSeek-V2: kv_lora_rank 512, qk_rope_head_dim 64
constexpr int64_t kMostKeysOfStep = 128;                        // of all kernels
constexpr int64_t kRowBytes = 24;                               // of a table of rows (score.cuh)
constexpr int64_t kUnitBytes = 64;                              // partial.cuh

// The queries and keys of a long sequence, by which a call is planned.
static inline int64_t likely_queries(const AttentionParams& p) { return p.query_ends ? p.likely_queries : p.q_len; }
static inline int64_t likely_keys(const AttentionParams& p) { return p.key_ends ? p.likely_keys : p.kv_len; }
// The tokens of a batch whose rows tiles hold: queries, of which a kv head has up to `members` rows each, or keys.
struct Tokens {
  const int64_t* ends;  // as in AttentionParams
  int64_t count, members;
};
ATTNPACK_HD static inline Tokens query_tokens(const AttentionParams& p, int64_t most_group) {
  return {p.query_ends, p.q_len, most_group};
}
ATTNPACK_HD static inline Tokens key_tokens(const AttentionParams& p) { return {p.key_ends, p.kv_len, 1}; }
// The tiles of `size` rows, and the sequence and the number in it of one.
ATTNPACK_HD static inline int64_t count_tiles(const AttentionParams& p, const Tokens& of, int64_t size) {
  return of.ends ? count_packed_tiles(of.count, p.sequences, of.members, size)
                 : (of.count * of.members + size - 1) / size;
}
ATTNPACK_HD static inline PackedTile place_of_tile(const AttentionParams& p, const Tokens& of, int64_t size, int64_t b,
                                                   int64_t tile) {
  return of.ends ? packed_tile(of.ends, of.count, p.sequences, of.members, size, tile) : PackedTile{b, tile};
}

struct Device {
  int64_t multiprocessors, shared_bytes;  // shared memory that a block may ask for
  bool sm90 = false;                      // whether the kernels of sm90/ can run
  int capability = 0;                     // 10 * major + minor
};

// Keys of a step of the forward kernels of sm90/.
constexpr int64_t forward_keys_sm90(int64_t width) { return width <= 192 ? 128 : 64; }

// Rows of a block of these kernels. Plain calls of narrow heads have registers for 192, which read each key less often.
// They pay where blocks are many: a tile of 192 rows takes less than 1.5 times the time of one of 128, so it may end up
// to a tenth later by the count of rows in the device's waves.
static inline int64_t forward_rows_sm90(int64_t width, bool plain, int64_t rows, int64_t heads,
                                        int64_t multiprocessors) {
  if (width != 64 || !plain) return kSm90TileRows;
  const auto end = [&](int64_t tile_rows) {
    const int64_t blocks = heads * ((rows + tile_rows - 1) / tile_rows);
    return (blocks + multiprocessors - 1) / multiprocessors * tile_rows;
  };
  return 9 * end(kSm90MostTileRows) <= 10 * end(kSm90TileRows) ? kSm90MostTileRows : kSm90TileRows;
}

// Asynchronous copies take chunks of 16 bytes, which must not straddle rows.
static inline bool aligned(const void* base, const Strides& s, int64_t width) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && s.batch % 8 == 0 && s.head % 8 == 0 && s.row % 8 == 0 &&
         width % 8 == 0;
}

static inline bool fits_tensor_cores(const AttentionParams& p) {
  return (p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16) && p.head_dim > 0 && p.v_head_dim > 0 &&
         aligned(p.query, p.query_strides, p.head_dim) && aligned(p.key, p.key_strides, p.head_dim) &&
         aligned(p.value, p.value_strides, p.v_head_dim);
}

// Copies of boxes (sm90/) count rows in 32 bits and steps in 40. Rows must not lie on each other, and no size may be 0.
static inline bool fits_boxes(const Strides& s, int64_t batch, int64_t heads, int64_t rows) {
  constexpr int64_t kMost = int64_t{1} << 38;
  return batch > 0 && heads > 0 && rows > 0 && rows < (int64_t{1} << 31) && (s.row > 0 || rows == 1) && s.row < kMost &&
         s.head < kMost && s.batch < kMost;
}
// Whether the forward kernels of sm90/ take a call of many rows, or a latent one.
static inline bool fits_sm90(const AttentionParams& p) {
  return !p.block_table && !p.quantized_bits && fits_boxes(p.key_strides, p.batch, p.num_kv_heads, p.kv_len) &&
         fits_boxes(p.value_strides, p.batch, p.num_kv_heads, p.kv_len) && aligned(p.out, p.out_strides, p.v_head_dim);
}

// A dimension of size 1 has no step, so any stride may stand there. It becomes 0, and layouts that are alike look
// alike.
static inline void drop_unused_strides(Strides& s, int64_t batch, int64_t heads, int64_t rows) {
  if (batch == 1) s.batch = 0;
  if (heads == 1) s.head = 0;
  if (rows == 1) s.row = 0;
}
static inline void drop_unused_strides(AttentionParams& p) {
  drop_unused_strides(p.query_strides, p.batch, p.num_heads, p.q_len);
  if (p.block_table) return;  // the sizes of a pool are others
  drop_unused_strides(p.key_strides, p.batch, p.num_kv_heads, p.kv_len);
  drop_unused_strides(p.value_strides, p.batch, p.num_kv_heads, p.kv_len);
}
static inline void drop_unused_strides(AttentionBackwardParams& bp) {
  const AttentionParams& p = bp.forward;
  drop_unused_strides(bp.grad_out_strides, p.batch, p.num_heads, p.q_len);
}

// Whether the values are the first columns of the keys. The keys are then read once.
static inline bool is_latent(const AttentionParams& p) {
  return p.head_dim == kLatentHeadDim && p.v_head_dim == kLatentValueDim && p.value == p.key &&
         p.value_strides.batch == p.key_strides.batch && p.value_strides.head == p.key_strides.head &&
         p.value_strides.row == p.key_strides.row;
}

// The shared memory that the tensor-core kernels use (forward_mma.cuh, forward_latent.cuh).
static inline int64_t shared_bytes(ForwardKernel kernel, int64_t tile_rows, int64_t width) {
  const int64_t table = tile_rows * kRowBytes;
  if (kernel == ForwardKernel::kLatentSm90)
    return ((tile_rows + 2 * 64) * width * 2 + tile_rows * 144 + table + kUnitBytes + 48 + 1023) / 1024 * 1024;
  if (kernel == ForwardKernel::kLatent) return (tile_rows + 64) * width * 2 + tile_rows * 112 + table;
  if (kernel == ForwardKernel::kDecode) return (tile_rows + 4 * 64) * width * 2 + table + kUnitBytes;
  if (kernel == ForwardKernel::kSm90) {
    const int64_t keys = forward_keys_sm90(width), values = width == 192 ? 128 : width;
    const int64_t operands = (tile_rows * width + 2 * keys * (width + values)) * 2, end = tile_rows * (values + 10) * 4;
    return ((operands > end ? operands : end) + table + kUnitBytes + 96 + 1023) / 1024 * 1024;
  }
  const int64_t keys = width <= 128 ? 64 : 32, end = tile_rows * (width + 10) * 4;
  const int64_t operands = (tile_rows + 2 * keys) * width * 2;
  return (operands > end ? operands : end) + table + kUnitBytes;
}
// Quantised decode: two steps of rows as they are stored, and one step of numbers (key_source.cuh).
static inline int64_t quantized_raw_bytes(int64_t bits, int64_t width) {
  return (kSplitStep * quantized_row_bytes(bits, width) + 15) / 16 * 16 + 16;
}
static inline int64_t quantized_shared_bytes(int64_t bits, int64_t width) {
  return (kDecodeTileRows + 2 * kSplitStep) * width * 2 + 4 * quantized_raw_bytes(bits, width) +
         kDecodeTileRows * kRowBytes + kUnitBytes;
}

// The kernel for a call that tensor cores take, by the rows and widths. Tiles are smaller where a block has less shared
// memory (99 KB on sm_86, sm_89 and sm_120).
struct TilePlan {
  ForwardKernel kernel;
  int32_t width;  // 0: none fits
  int64_t tile_rows;
};
static inline TilePlan plan_tile(const AttentionParams& p, int64_t most_group, const Device& device) {
  const int64_t wide = p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim;
  const bool few = most_group * likely_queries(p) <= kDecodeTileRows, latent = is_latent(p), plain = is_plain(p);
  const bool sm90 = device.sm90 && (latent ? plain : !few) && fits_sm90(p);
  TilePlan tile{latent ? (sm90 ? ForwardKernel::kLatentSm90 : ForwardKernel::kLatent)
                : few  ? ForwardKernel::kDecode
                : sm90 ? ForwardKernel::kSm90
                       : ForwardKernel::kPrefill,
                latent                                                     ? static_cast<int32_t>(kLatentHeadDim)
                : sm90 && wide > 128 && wide <= 192 && p.v_head_dim <= 128 ? 192
                : wide <= 64                                               ? 64
                : wide <= 128                                              ? 128
                : wide <= 256                                              ? 256
                                                                           : 0,
                0};
  tile.tile_rows = latent && (sm90 || !few) ? kLatentTileRows
                   : few                    ? kDecodeTileRows
                   : sm90 ? forward_rows_sm90(tile.width, plain, most_group * p.q_len, p.batch * p.num_kv_heads,
                                              device.multiprocessors)
                          : prefill_rows(tile.width, plain);
  const auto fits = [&] { return shared_bytes(tile.kernel, tile.tile_rows, tile.width) <= device.shared_bytes; };
  if (!fits() && latent) tile.tile_rows = kDecodeTileRows;
  if (!fits() && tile.kernel == ForwardKernel::kDecode)  // it holds 64 keys at once, and prefill half of them
    tile.kernel = ForwardKernel::kPrefill, tile.tile_rows = prefill_rows(tile.width, plain);
  if (!fits()) tile.width = 0;
  return tile;
}

// Whether a kernel reads keys in pages, or quantised rows. Else the caller makes plain keys of them.
static inline bool reads_pages(const AttentionParams& p, int64_t most_group, const Device& device) {
  const TilePlan tile = plan_tile(p, most_group, device);
  return fits_tensor_cores(p) && tile.width > 0 &&
         (tile.kernel == ForwardKernel::kDecode || tile.kernel == ForwardKernel::kPrefill);
}
static inline bool reads_quantized(const AttentionParams& p, int64_t most_group, const Device& device) {
  const auto whole = [&](const Strides& s, int64_t dim) {  // rows without gaps, in whole words
    const int64_t bytes = quantized_row_bytes(p.quantized_bits, dim);
    return bytes % 4 == 0 && dim % 8 == 0 && (s.row == bytes || p.kv_len == 1) && s.batch % 4 == 0 && s.head % 4 == 0;
  };
  const int64_t wide = p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim;
  return (p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16) && wide <= 256 &&
         most_group * p.q_len <= kDecodeTileRows && aligned(p.query, p.query_strides, p.head_dim) &&
         (reinterpret_cast<uintptr_t>(p.key) | reinterpret_cast<uintptr_t>(p.value)) % 16 == 0 &&
         whole(p.key_strides, p.head_dim) && whole(p.value_strides, p.v_head_dim) &&
         quantized_shared_bytes(p.quantized_bits, wide <= 64    ? 64
                                                  : wide <= 128 ? 128
                                                                : 256) <= device.shared_bytes;
}

// most_group: the size of the largest group of query heads that share a kv head.
static inline ForwardPlan plan_forward(const AttentionParams& p, int64_t most_group, const Device& device) {
  ForwardPlan plan{};
  plan.most_group = most_group;
  plan.rows = most_group * p.q_len;
  plan.column_blocks = 1;
  const TilePlan tile = plan_tile(p, most_group, device);
  int64_t at_once = device.multiprocessors, shared = shared_bytes(tile.kernel, tile.tile_rows, tile.width);
  plan.kernel = tile.kernel;
  plan.width = tile.width;
  plan.tile_rows = tile.tile_rows;
  if (p.quantized_bits) {  // the caller has asked reads_quantized
    plan.kernel = ForwardKernel::kDecode;
    plan.tile_rows = kDecodeTileRows;
    shared = quantized_shared_bytes(p.quantized_bits, plan.width);
  }
  if (p.quantized_bits || (fits_tensor_cores(p) && plan.width > 0)) {
    at_once *= 2 * shared <= device.shared_bytes ? 2 : 1;
  } else {
    plan.kernel = ForwardKernel::kExact;
    plan.tile_rows = kExactRows;
    plan.column_blocks = p.v_head_dim > kExactColumns ? (p.v_head_dim + kExactColumns - 1) / kExactColumns : 1;
    at_once *= 8;
  }
  plan.tiles = count_tiles(p, query_tokens(p, most_group), plan.tile_rows);
  const int64_t heads = p.batch * p.num_kv_heads, blocks = heads * plan.tiles * plan.column_blocks;
  plan.parts = parts_of_keys(blocks, at_once, likely_keys(p));
  plan.blocks = blocks * plan.parts;
  if (plan.parts > 1)
    plan.workspace_bytes = heads * plan.parts * plan.rows * (p.v_head_dim + 2) * (p.dtype == DType::kFloat64 ? 8 : 4);
  const bool stores_mask = plan.kernel == ForwardKernel::kSm90 && is_masked(p);
  if (stores_mask) {
    plan.mask = plan_mask_bits(p, plan.workspace_bytes);
    plan.lists = plan_key_lists(p, plan.tiles, forward_keys_sm90(plan.width), end_of(plan.mask));
    plan.workspace_bytes = end_of(plan.lists);
  }
  // Causality may come as a mask.
  plan.section = heads_of_section(has_ranges(p) || stores_mask, heads * plan.parts,
                                  p.kv_len * (p.head_dim + p.v_head_dim) * bytes_of(p.dtype) / plan.parts);
  return plan;
}

enum class Gradient : int32_t { kQuery, kKey, kValue, kKeyAndValue };

constexpr int64_t kBackwardOwners = 64;  // rows or keys of a block on tensor cores

// How one gradient is cut into blocks. The owners are the rows of a kv head, whose others are keys, or its keys, whose
// others are rows.
struct GradientPlan {
  int64_t owners;   // most of a kv head
  int64_t tiles;    // of a kv head's owners
  int64_t parts;    // of a tile's others (gradient_parts.cuh)
  int64_t section;  // heads of a section, each part counted as a head (place_of_block)
  int64_t blocks;
};
struct BackwardPlan {
  // Head dims that the tensor-core kernels have room for: 64, 128, 256; sm90/ also 192 with values of 128; 0: the exact
  // kernels.
  int32_t width;
  bool sm90;           // whether the kernels of sm90/ take the call
  int64_t most_group;  // size of the largest group of query heads that share a kv head
  GradientPlan of_rows, of_keys;
  MaskBits mask;  // sm90/, if the call is_masked
  MaskLists lists_of_rows, lists_of_keys;
  int64_t workspace_bytes;  // memory for the partial sums of one gradient, if there are several parts, and for the mask
  ATTNPACK_HD const GradientPlan& of(Gradient gradient) const {
    return gradient == Gradient::kQuery ? of_rows : of_keys;
  }
};

constexpr int64_t backward_step(int64_t width) { return width <= 64 ? 64 : width <= 128 ? 32 : 16; }
static inline int64_t backward_shared_bytes(int64_t width) {
  const int64_t step = backward_step(width), table = step > kBackwardOwners / 2 ? 2 * step : kBackwardOwners;
  return (2 * kBackwardOwners + 4 * step) * width * 2 + table * 48;
}
// The width of the backward kernels of sm90/ that a call fits, or 0.
static inline int32_t backward_width_sm90(int64_t head_dim, int64_t v_head_dim) {
  const int64_t wide = head_dim > v_head_dim ? head_dim : v_head_dim;
  return wide <= 64 ? 64 : wide <= 128 ? 128 : head_dim <= 192 && v_head_dim <= 128 ? 192 : 0;
}
// Whether these kernels take a call that tensor cores take.
static inline bool backward_fits_sm90(const AttentionBackwardParams& bp) {
  const AttentionParams& p = bp.forward;
  const int32_t width = backward_width_sm90(p.head_dim, p.v_head_dim);
  return width > 0 && (width <= 128 || is_plain(p) || is_masked(p)) && !bp.grad_scores &&
         fits_boxes(p.key_strides, p.batch, p.num_kv_heads, p.kv_len) &&
         fits_boxes(p.value_strides, p.batch, p.num_kv_heads, p.kv_len) &&
         fits_boxes(p.query_strides, p.batch, p.num_heads, p.q_len) &&
         fits_boxes(bp.grad_out_strides, p.batch, p.num_heads, p.q_len) &&
         aligned(bp.grad_query, bp.grad_query_strides, p.head_dim) &&
         aligned(bp.grad_key, bp.grad_key_strides, p.head_dim) &&
         aligned(bp.grad_value, bp.grad_value_strides, p.v_head_dim);
}
// Owners and steps of the backward kernels of sm90/, and their shared memory.
constexpr int64_t kBackwardOwnersSm90 = 128, kBackwardStepSm90 = 64;
constexpr int64_t backward_values_sm90(int64_t width) { return width == 192 ? 128 : width; }
// Rows of a step of the key's gradient, whose two sums leave few registers where heads are wide.
constexpr int64_t backward_rows_sm90(int64_t width) { return width == 192 ? 32 : kBackwardStepSm90; }
// The query gradient uses the keys of a step until the step after it ends. With two stages no load would be under way.
constexpr int64_t kBackwardStagesSm90 = 3;
static inline int64_t backward_shared_bytes_sm90(int64_t width) {
  const auto whole = [](int64_t bytes) { return (bytes + 1023) / 1024 * 1024; };
  const int64_t both = width + backward_values_sm90(width);
  const int64_t operands = (kBackwardOwnersSm90 + kBackwardStagesSm90 * kBackwardStepSm90) * both * 2;
  const int64_t sums = kBackwardOwnersSm90 * (both + 16) * 4;
  // Then barriers, and after them a table of rows, the mask's bits of a stage's rows, flags and a block's place.
  const int64_t bits = kBackwardStagesSm90 * kBackwardStepSm90 * kBackwardOwnersSm90 / 8;
  return whole(whole((operands > sums ? operands : sums) + 128) + kBackwardOwnersSm90 * kRowBytes + bits + 128);
}

ATTNPACK_HD static inline Tokens owners_of(const AttentionParams& p, Gradient of, int64_t most_group) {
  return of == Gradient::kQuery ? query_tokens(p, most_group) : key_tokens(p);
}
struct OwnersPlace {
  int32_t batch, kv_head, part;
  int64_t first;     // of the sequence's owners
  int32_t sequence;  // of the packed ones; else batch
};
// The sequence, the kv head, the part of the others and the first owner of a block. The longest tiles come first: with
// causality the last rows see most keys, and the first keys are seen by most rows.
ATTNPACK_HD static inline OwnersPlace place_of_owners(const AttentionParams& p, const BackwardPlan& backward,
                                                      Gradient of, int64_t tile_owners, int64_t block) {
  const GradientPlan& plan = backward.of(of);
  const BlockPlace at = place_of_block(block, p.batch * p.num_kv_heads * plan.parts, plan.tiles, plan.section);
  const int32_t parts = static_cast<int32_t>(plan.parts);
  const HeadPlace head = place_of_head(at.head / parts, p.num_kv_heads);
  const int64_t number = of == Gradient::kQuery ? static_cast<int32_t>(plan.tiles) - 1 - at.tile : at.tile;
  const PackedTile tile = place_of_tile(p, owners_of(p, of, backward.most_group), tile_owners, head.batch, number);
  return {head.batch, head.kv_head, at.head % parts, tile.tile * tile_owners, static_cast<int32_t>(tile.sequence)};
}
// Floats that a block of a part leaves per owner: the sums of dQ, or those of dK and then of dV.
ATTNPACK_HD static inline int64_t gradient_columns(const AttentionParams& p, Gradient of) {
  return of == Gradient::kQuery ? p.head_dim : p.head_dim + p.v_head_dim;
}

// at_once: how many blocks the device runs at once. uneven: whether tiles differ in length.
static inline GradientPlan plan_gradient(const AttentionParams& p, Gradient of, int64_t most_group, int64_t tile_owners,
                                         int64_t step, int64_t at_once, bool uneven) {
  const Tokens owners = owners_of(p, of, most_group);
  const int64_t others = of == Gradient::kQuery ? likely_keys(p) : most_group * likely_queries(p);
  // A block of a part writes its sums in the time of about three steps. Fewer than four would not be worth it.
  constexpr int64_t kFewestSteps = 4, kEnds = 3;
  GradientPlan plan{};
  plan.owners = owners.count * owners.members;
  plan.tiles = count_tiles(p, owners, tile_owners);
  const int64_t heads = p.batch * p.num_kv_heads, blocks = heads * plan.tiles;
  plan.parts = parts_of_steps(blocks, at_once, (others + step - 1) / step, kFewestSteps, kEnds);
  plan.section = heads_of_section(uneven, heads * plan.parts,
                                  others * (p.head_dim + p.v_head_dim) * bytes_of(p.dtype) / plan.parts);
  plan.blocks = blocks * plan.parts;
  return plan;
}

static inline BackwardPlan plan_backward(const AttentionBackwardParams& bp, int64_t most_group, const Device& device) {
  const AttentionParams& p = bp.forward;
  const int64_t wide = p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim;
  BackwardPlan plan{};
  plan.width = wide <= 64 ? 64 : wide <= 128 ? 128 : wide <= 256 ? 256 : 0;
  plan.most_group = most_group;
  if (!fits_tensor_cores(p) || !aligned(bp.grad_out, bp.grad_out_strides, p.v_head_dim) ||
      backward_shared_bytes(plan.width) > device.shared_bytes)
    plan.width = 0;
  if (plan.width == 0) return plan;
  plan.sm90 = device.sm90 && backward_fits_sm90(bp);
  if (plan.sm90) plan.width = backward_width_sm90(p.head_dim, p.v_head_dim);
  const bool stores_mask = plan.sm90 && is_masked(p);
  const int64_t blocks_each = !plan.sm90 && plan.width <= 128 ? 2 : 1;  // that a multiprocessor runs at once
  const int64_t most = device.shared_bytes / backward_shared_bytes(plan.width);
  const int64_t at_once = device.multiprocessors * (most < blocks_each ? most : blocks_each);
  for (Gradient of : {Gradient::kQuery, Gradient::kKeyAndValue}) {
    GradientPlan& gradient = of == Gradient::kQuery ? plan.of_rows : plan.of_keys;
    const int64_t step = !plan.sm90               ? backward_step(plan.width)
                         : of == Gradient::kQuery ? kBackwardStepSm90
                                                  : backward_rows_sm90(plan.width);
    gradient = plan_gradient(p, of, most_group, plan.sm90 ? kBackwardOwnersSm90 : kBackwardOwners, step, at_once,
                             has_ranges(p) || stores_mask);
    const int64_t floats = p.batch * p.num_kv_heads * gradient.parts * gradient.owners * gradient_columns(p, of);
    if (gradient.parts > 1 && 4 * floats > plan.workspace_bytes) plan.workspace_bytes = 4 * floats;
  }
  if (stores_mask) {
    plan.mask = plan_mask_bits(p, plan.workspace_bytes);
    plan.lists_of_rows = plan_key_lists(p, plan.of_rows.tiles, kBackwardStepSm90, end_of(plan.mask));
    plan.lists_of_keys =
        plan_row_lists(p, plan.of_keys.tiles, backward_rows_sm90(plan.width), most_group, end_of(plan.lists_of_rows));
    plan.workspace_bytes = end_of(plan.lists_of_keys);
  }
  return plan;
}

}  // namespace attnpack::cuda
