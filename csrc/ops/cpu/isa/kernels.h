#pragma once

#include <cstddef>

#include <attnpack/core/params.h>

// The units of work of one instruction set. A unit never depends on another, on the thread count or on the batch, so
// results are bitwise the same however units are handed out.
namespace attnpack {

// Rows of a kv head: all (query, member of the group) pairs that share it, row = query * group_size + member, so that
// keys and values are read once a group and neighbouring rows see almost the same keys.
struct Kernels {
  // Forward, many rows: a tile of rows against all keys. scratch: prefill_scratch bytes, zeroed flags at its start.
  size_t (*prefill_scratch)(const AttentionParams&);
  void (*prefill)(const AttentionParams&, int64_t b, int64_t kv_head, Range rows, void* scratch);

  // Forward, one tile of rows: all rows of a kv head against a range of keys, which leave in partial, per row: max,
  // sum, v_head_dim values.
  void (*prefill_range)(const AttentionParams&, int64_t b, int64_t kv_head, Range keys, void* partial, void* scratch);

  // The same for few rows, which stream keys and values as they lie instead of packing them.
  size_t (*decode_scratch)(const AttentionParams&);
  void (*decode)(const AttentionParams&, int64_t b, int64_t kv_head, Range keys, void* partial, void* scratch);
  // Joins the partials of a kv head, [count, rows, v_head_dim + 2], in their order, into out and lse.
  void (*merge)(const AttentionParams&, int64_t b, int64_t kv_head, const void* partials, int64_t count);

  // Backward: the gradients of a block of keys, or of a tile of rows.
  size_t (*backward_scratch)(const AttentionParams&);
  void (*backward_keys)(const AttentionBackwardParams&, int64_t b, int64_t kv_head, Range keys, void* scratch);
  void (*backward_rows)(const AttentionBackwardParams&, int64_t b, int64_t kv_head, Range rows, void* scratch);

  // A range of outputs of a linear layer for few rows.
  size_t (*linear_scratch)(const LinearParams&);
  void (*linear_rows)(const LinearParams&, Range outputs, void* scratch);
};

// How work is cut, from one sequence's shapes alone.
constexpr int64_t kTileQueryRows = 96;  // rows of a prefill or backward tile
constexpr int64_t kDecodeRows = 8;      // up to so many rows of a kv head stream the keys
constexpr int64_t kRangeKeys = 512;     // keys of a unit where a kv head has one tile of rows, or fewer
constexpr int64_t kBackwardKeys = 128;  // keys of a backward block
constexpr int64_t kPackedKeys = 8192;   // keys of a head that stay packed in scratch between tiles

#define ATTNPACK_DECLARE_ISA(isa)                                                     \
  namespace isa {                                                                     \
  size_t prefill_scratch(const AttentionParams&);                                     \
  void prefill(const AttentionParams&, int64_t, int64_t, Range, void*);               \
  void prefill_range(const AttentionParams&, int64_t, int64_t, Range, void*, void*);  \
  size_t decode_scratch(const AttentionParams&);                                      \
  void decode(const AttentionParams&, int64_t, int64_t, Range, void*, void*);         \
  void merge(const AttentionParams&, int64_t, int64_t, const void*, int64_t);         \
  size_t backward_scratch(const AttentionParams&);                                    \
  void backward_keys(const AttentionBackwardParams&, int64_t, int64_t, Range, void*); \
  void backward_rows(const AttentionBackwardParams&, int64_t, int64_t, Range, void*); \
  size_t linear_scratch(const LinearParams&);                                         \
  void linear_rows(const LinearParams&, Range, void*);                                \
  }
ATTNPACK_DECLARE_ISA(baseline)
#if defined(__x86_64__)
ATTNPACK_DECLARE_ISA(avx2)
ATTNPACK_DECLARE_ISA(avx512)
#endif
#undef ATTNPACK_DECLARE_ISA

}  // namespace attnpack
