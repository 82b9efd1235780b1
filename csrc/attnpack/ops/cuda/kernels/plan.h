#pragma once

#include <cstdint>

#include <attnpack/core/params.h>
#include <attnpack/ops/cuda/kernels/index.h>

// Decides which kernel takes a call, and how the call is cut into blocks: by shapes, layout and device alone.
namespace attnpack::cuda {

enum class ForwardKernel : int32_t { kExact, kPrefill, kDecode, kLatent };

struct ForwardPlan {
  ForwardKernel kernel;
  int32_t width;          // head dims that the tensor-core kernel has room for: 64, 128, 256; latent 576
  int64_t rows;           // most rows of a kv head: queries times members of the group
  int64_t tile_rows;      // rows of a block
  int64_t tiles;          // tiles of a kv head's rows
  int64_t column_blocks;  // exact kernel: blocks that share the columns of the values
  Split split;            // of the keys
  int64_t blocks;
  int64_t workspace_bytes;  // memory for the partial results, if there are several parts
};

constexpr int64_t kExactRows = 16, kDecodeTileRows = 16, kPrefillTileRows = 64, kExactColumns = 128;
constexpr int64_t kLatentHeadDim = 576, kLatentValueDim = 512;  // DeepSeek-V2: kv_lora_rank 512, qk_rope_head_dim 64

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

// Whether the values are the first columns of the keys. The keys are then read once.
static inline bool is_latent(const AttentionParams& p) {
  return p.head_dim == kLatentHeadDim && p.v_head_dim == kLatentValueDim && p.value == p.key &&
         p.value_strides.batch == p.key_strides.batch && p.value_strides.head == p.key_strides.head &&
         p.value_strides.row == p.key_strides.row;
}

struct Device {
  int64_t multiprocessors, shared_bytes;  // shared memory that a block may ask for
};

// The shared memory that the tensor-core kernels use (forward_mma.cuh, forward_latent.cuh).
static inline int64_t shared_bytes(ForwardKernel kernel, int64_t tile_rows, int64_t width) {
  if (kernel == ForwardKernel::kLatent) return (tile_rows + 64) * width * 2 + tile_rows * 112;
  const int64_t keys = width <= 128 || kernel == ForwardKernel::kDecode ? 64 : 32;
  return (tile_rows + 4 * keys) * width * 2;
}

// most_group: the size of the largest group of query heads that share a kv head.
static inline ForwardPlan plan_forward(const AttentionParams& p, int64_t most_group, const Device& device) {
  ForwardPlan plan{};
  plan.rows = most_group * p.q_len;
  plan.column_blocks = 1;
  const int64_t wide = p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim;
  int64_t at_once = device.multiprocessors;
  plan.tile_rows = plan.rows <= kDecodeTileRows ? kDecodeTileRows : kPrefillTileRows;
  if (is_latent(p)) {
    plan.kernel = ForwardKernel::kLatent;
    plan.width = static_cast<int32_t>(kLatentHeadDim);
  } else {
    plan.kernel = plan.rows <= kDecodeTileRows ? ForwardKernel::kDecode : ForwardKernel::kPrefill;
    plan.width = wide <= 64 ? 64 : wide <= 128 ? 128 : wide <= 256 ? 256 : 0;
  }
  const int64_t shared = shared_bytes(plan.kernel, plan.tile_rows, plan.width);
  if (fits_tensor_cores(p) && plan.width > 0 && shared <= device.shared_bytes) {
    at_once *= 2 * shared <= device.shared_bytes ? 2 : 1;
  } else {
    plan.kernel = ForwardKernel::kExact;
    plan.tile_rows = kExactRows;
    plan.column_blocks = p.v_head_dim > kExactColumns ? (p.v_head_dim + kExactColumns - 1) / kExactColumns : 1;
    at_once *= 8;
  }
  plan.tiles = plan.rows > 0 ? (plan.rows + plan.tile_rows - 1) / plan.tile_rows : 0;
  const int64_t heads = p.batch * p.num_kv_heads, blocks = heads * plan.tiles * plan.column_blocks;
  plan.split = split_keys(blocks, at_once, p.kv_len, 64);
  plan.blocks = blocks * plan.split.parts;
  if (plan.split.parts > 1)
    plan.workspace_bytes = heads * plan.split.parts * plan.rows * (p.v_head_dim + 2) *
                           static_cast<int64_t>(p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
  return plan;
}

enum class Gradient : int32_t { kQuery, kKey, kValue, kKeyAndValue };

constexpr int64_t kBackwardOwners = 64;  // rows or keys of a block on tensor cores

struct BackwardPlan {
  int32_t width;       // head dims that the tensor-core kernels have room for: 64, 128, 256; 0: the exact ones
  int64_t most_group;  // size of the largest group of query heads that share a kv head
};

static inline int64_t backward_shared_bytes(int64_t width) {
  const int64_t others = width <= 64 ? 64 : 32;
  return (2 * kBackwardOwners + 4 * others) * width * 2 + 4096;
}
// How many blocks of owners one kv head has.
ATTNPACK_HD static inline int64_t backward_tiles(const AttentionParams& p, const BackwardPlan& plan, Gradient of) {
  const int64_t owners = of == Gradient::kQuery ? plan.most_group * p.q_len : p.kv_len;
  return (owners + kBackwardOwners - 1) / kBackwardOwners;
}

static inline BackwardPlan plan_backward(const AttentionBackwardParams& bp, int64_t most_group, const Device& device) {
  const AttentionParams& p = bp.forward;
  const int64_t wide = p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim;
  int32_t width = wide <= 64 ? 64 : wide <= 128 ? 128 : wide <= 256 ? 256 : 0;
  if (!fits_tensor_cores(p) || !aligned(bp.grad_out, bp.grad_out_strides, p.v_head_dim) ||
      backward_shared_bytes(width) > device.shared_bytes)
    width = 0;
  return {width, most_group};
}

}  // namespace attnpack::cuda
