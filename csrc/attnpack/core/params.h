#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

// Marks functions that CUDA kernels call too.
#ifdef __CUDACC__
#define ATTNPACK_HD __host__ __device__
#else
#define ATTNPACK_HD
#endif

// The structs that kernels read: sizes, strides, pointers and settings. They hold no tensors and need no framework
// headers.
namespace attnpack {

enum class DType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16, kBool };
ATTNPACK_HD static inline int64_t bytes_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : dtype == DType::kBool ? 1 : 2;
}

// `base` moved by so many elements of a tensor, whose type is known by its bytes only; null stays null.
template <class T>
static inline T* moved(T* base, int64_t elements, int64_t element_size) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return base ? static_cast<Byte*>(base) + elements * element_size : nullptr;
}

// Element strides of a [batch, head, row, column] tensor; the kernels want column == 1 except for masks.
struct Strides {
  int64_t batch = 0, head = 0, row = 0, column = 1;
};

// Keys that a row names (key_index). Such a call is one row of a larger one. Its keys are the selected ones that
// causality, window, chunk and kv_lens leave, in rising order, without the others: key j stands in row (skipped + j) %
// page_size of page block_table[(skipped + j) / page_size], where the pages are the blocks of key_block keys of the
// sequence.
struct SelectedKeys {
  bool given;
  int64_t skipped;         // keys of the first page that are left out
  int64_t num_kv_heads;    // of the whole call, whose keys are cut alike
  int64_t first_score;     // the place of the row's first score in [batch, num_heads, q_len, kv_len], for head 0,
  int64_t scores_of_head;  // and how many scores the whole call has per head
};

struct AttentionParams {
  int64_t batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, v_head_dim;
  DType dtype;  // of query, key, value, out and their gradients

  const void* query;  // [batch, num_heads, q_len, head_dim]
  const void* key;    // [batch, num_kv_heads, kv_len, head_dim]
  const void* value;  // [batch, num_kv_heads, kv_len, v_head_dim]
  Strides query_strides, key_strides, value_strides;
  // Keys in pages, or null. Then key and value are pools [num_pages, num_kv_heads, page_size, width], and key j of
  // sequence b is row j % page_size of page block_table[b * table_stride + j / page_size]. The stride `batch` is that
  // of a page. On the CPU the batch is one sequence.
  const int32_t* block_table;  // a page for each page_size of the kv_len keys; anything may follow
  int64_t page_size, num_pages, table_stride;
  SelectedKeys selected;   // only for the CPU
  int64_t quantized_bits;  // 8 or 4: key and value are quantised rows (core/quantized.h), strides in bytes; 0: numbers

  // Packed sequences, or 0. The batch is then one, whose q_len and kv_len rows are those of all sequences. Sequence b
  // has the rows query_ends[b] to query_ends[b + 1] of them, and the keys key_ends[b] to key_ends[b + 1], or those of
  // its pages. What a call has per batch in block_table, q_offsets and kv_lens is per sequence. Only for CUDA.
  int64_t sequences;
  const int64_t *query_ends, *key_ends;  // [sequences + 1]; key_ends: null if keys are in pages
  int64_t likely_queries, likely_keys;   // of a long sequence: they choose among kernels, and limit nothing

  void* out;  // [batch, num_heads, q_len, v_head_dim]
  Strides out_strides;
  void* lse;  // [batch, num_heads, q_len], contiguous, accumulation type

  // Query heads sorted by kv head (core/head_groups.h); null: consecutive heads form equal groups.
  const int64_t* group_start;  // [num_kv_heads + 1]
  const int64_t* group_heads;  // [num_heads]

  double scale;
  double softcap;  // 0: off; a normal number of the accumulation type

  const void* mask;  // broadcast to [batch, num_heads, q_len, kv_len] by strides; null: none
  DType mask_dtype;
  Strides mask_strides;

  bool causal;
  int64_t q_offset;
  const int64_t* q_offsets;           // [batch], instead of q_offset
  bool at_end;                        // instead of both: query row 0 stands at the keys less the queries. Only for CUDA
  int64_t window_left, window_right;  // -1: unbounded
  int64_t chunk;                      // 0: none; only for the CPU
  const int64_t* kv_lens;             // [batch] valid keys; null: kv_len

  const double* sinks;         // [num_heads] or null
  const double* alibi_slopes;  // [num_heads] or null

  double dropout_p;  // this and the next two by set_dropout (core/dropout.h)
  double kept_factor;
  uint64_t dropout_below;
  uint64_t dropout_seed;
  const int64_t* dropout_seed_at;  // CUDA: where the seed stands on the device; null: dropout_seed
};

struct AttentionBackwardParams {
  AttentionParams forward;  // out and lse are read here
  const void* grad_out;     // as out
  Strides grad_out_strides;
  const void* delta;     // [batch, num_heads, q_len]: rowsum(grad_out * out) - grad_lse, accumulation type
  const void* grad_lse;  // as delta, or null
  void* grad_query;      // as query
  void* grad_key;        // as key
  void* grad_value;      // as value
  Strides grad_query_strides, grad_key_strides, grad_value_strides;
  // grad_query_sums: the running sums of grad_query in the accumulation type, [batch, rows, sums_width(head_dim)]. The
  // rows of a sequence are those of its kv heads, one kv head after the other, in the order of the tiles. blocks_done:
  // how many blocks of keys each tile of rows has summed up; 0 at first.
  void* grad_query_sums;
  int32_t* blocks_done;  // [batch, num_kv_heads, tiles]
  int64_t tiles;
  // For the mask's gradient, or null: [batch, num_heads, q_len, kv_len], contiguous, accumulation type.
  void* grad_scores;
  bool wide_key_gradients;  // grad_key and grad_value hold numbers of the accumulation type
};

constexpr int64_t kFewRows = 32;  // the most rows of a LinearParams

// out [rows, outputs] = input [rows, inputs] weight^T + bias, for few rows; all but the weight contiguous.
struct LinearParams {
  int64_t rows, inputs, outputs;
  DType dtype;
  const void* input;
  const void* weight;  // [outputs, inputs], rows weight_stride apart
  int64_t weight_stride;
  const void* bias;  // [outputs] or null
  void* out;
  bool float_out;  // out holds fp32, whatever the dtype is
};

// out = x / sqrt(mean(x^2) + eps) * weight over rows of dim elements, all contiguous. With `added` x is x + added,
// which is written to sum.
struct RmsNormParams {
  int64_t dim;
  DType dtype;
  double eps;
  const void* x;
  const void* weight;  // [dim]
  void* out;
  const void* added;  // as x, or null
  void* sum;          // as x, or null
};

// out = silu(gate) * up, contiguous.
struct SwigluParams {
  DType dtype;
  const void* gate;
  const void* up;
  void* out;
};

// Linear attention over sequences with a state each. Tensors of the accumulation type: log_decay, beta, the states.
struct LinearAttentionParams {
  int64_t sequences, num_heads, num_key_heads, length, head_dim, v_head_dim;
  int64_t shared_heads;  // value heads of a unit of work, which share a key head
  DType dtype;           // of query, key, value and out
  double scale;

  const void* query;  // [batch, num_key_heads, length, head_dim]
  const void* key;    // as query
  const void* value;  // [batch, num_heads, length, v_head_dim]
  Strides query_strides, key_strides, value_strides;
  const void* log_decay;  // [batch, num_heads, length], or per channel [batch, num_heads, length, head_dim], or null
  Strides log_decay_strides;
  bool per_channel;
  const void* beta;  // [batch, num_heads, length] or null: no delta rule
  Strides beta_strides;
  const void* initial_state;  // [sequences, num_heads, head_dim, v_head_dim], contiguous, or null: zeros

  // Packed sequences stand one after the other in a batch of one: sequence n has the tokens ends[n] to ends[n + 1].
  // Otherwise sequence n is row n of the batch, with kv_lens[n] tokens, or `length` where kv_lens is null.
  const int64_t* ends;     // [sequences + 1] or null
  const int64_t* kv_lens;  // [sequences] or null

  void* out;  // [batch, num_heads, length, v_head_dim]
  Strides out_strides;
  void* state;               // as initial_state
  int32_t* positive_decays;  // becomes 1 where a log decay is above 0
};

// All gradients are contiguous. Those of query and key are the sums over a key head's value heads; with one such head
// they are of dtype, as that of value. The others are of the accumulation type.
struct LinearAttentionBackwardParams {
  LinearAttentionParams forward;  // out and state are not read
  const void* grad_out;           // as out
  Strides grad_out_strides;
  const void* grad_state;  // as state, or null
  void *grad_query, *grad_key, *grad_value;
  void *grad_log_decay, *grad_beta, *grad_initial_state;  // or null
};

// A causal convolution of each channel by itself. Rows of channels, each channel beside the next: x, out, the states.
struct CausalConv1dParams {
  int64_t sequences, length, channels, taps;
  DType dtype;  // of x, out and the states
  bool silu;

  const void* x;  // [batch, length, channels]
  int64_t x_batch_stride, x_row_stride;
  const void* weight;         // [channels, taps] of the accumulation type, contiguous
  const void* bias;           // [channels], as weight, or null
  const void* initial_state;  // [sequences, taps - 1, channels], contiguous, or null: zeros
  const int64_t* ends;        // as in LinearAttentionParams
  const int64_t* kv_lens;

  void* out;    // as x, contiguous
  void* state;  // as initial_state
};

// Gradients of x and the initial state are of dtype; the others of the accumulation type.
struct CausalConv1dBackwardParams {
  CausalConv1dParams forward;  // out and state are not read
  const void* grad_out;        // as out
  const void* grad_state;      // as state, or null
  void* grad_x;                // as out
  void* grad_weight;           // [sequences, taps, channels]
  void* grad_bias;             // [sequences, channels]
  void* grad_initial_state;    // as state, or null
};

// A range of keys or queries.
struct Range {
  int64_t begin, end;
  ATTNPACK_HD bool empty() const { return begin >= end; }
  ATTNPACK_HD int64_t count() const { return end - begin; }
};

// On CUDA nobody has checked the lengths and ends of sequences, because reading them would wait for the device: numbers
// out of range become the nearest ones in range.
ATTNPACK_HD static inline int64_t clamped(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// The rows of sequence b in a tensor of `rows` rows: all of them, unless sequences are packed.
ATTNPACK_HD static inline Range rows_of_sequence(const int64_t* ends, int64_t rows, int64_t b) {
  if (!ends) return {0, rows};
  const int64_t begin = clamped(ends[b], 0, rows);
  return {begin, clamped(ends[b + 1], begin, rows)};
}
ATTNPACK_HD static inline Range queries_of(const AttentionParams& p, int64_t b) {
  return rows_of_sequence(p.query_ends, p.q_len, b);
}
ATTNPACK_HD static inline Range keys_of(const AttentionParams& p, int64_t b) {
  return rows_of_sequence(p.key_ends, p.kv_len, b);
}
ATTNPACK_HD static inline int64_t count_queries(const AttentionParams& p, int64_t b) {
  return queries_of(p, b).count();
}

// The number of valid keys of sequence b. The keys after them are padding.
ATTNPACK_HD static inline int64_t valid_keys(const AttentionParams& p, int64_t b) {
  return p.kv_lens ? clamped(p.kv_lens[b], 0, p.kv_len) : keys_of(p, b).count();
}

// The position of query row 0 of sequence b, within kMostOffset of 0, so that sums with windows stay in 64 bits.
constexpr int64_t kMostOffset = (int64_t{1} << 60) / 2 * 3;
// The most positions of a chunk. So a position beyond kMostOffset is in another chunk than every key.
constexpr int64_t kMostChunk = int64_t{1} << 59;
ATTNPACK_HD static inline int64_t first_position(const AttentionParams& p, int64_t b) {
  if (p.at_end) return valid_keys(p, b) - count_queries(p, b);
  return p.q_offsets ? clamped(p.q_offsets[b], -kMostOffset, kMostOffset) : p.q_offset;
}

// The range of keys that causality, window and chunk leave to a query at a position, of so many valid keys.
ATTNPACK_HD static inline Range keys_at(const AttentionParams& p, int64_t position, int64_t valid) {
  Range keys{0, valid};
  if (p.causal && position + 1 < keys.end) keys.end = position + 1;
  if (p.window_right >= 0 && position + p.window_right + 1 < keys.end) keys.end = position + p.window_right + 1;
  if (p.window_left >= 0 && position - p.window_left > keys.begin) keys.begin = position - p.window_left;
#ifndef __CUDA_ARCH__  // such a call gets a mask there: a division of 64 bits would cost all kernels registers
  if (p.chunk > 0) {
    const int64_t past = position % p.chunk, begin = position - (past < 0 ? past + p.chunk : past);
    if (begin > keys.begin) keys.begin = begin;
    if (begin + p.chunk < keys.end) keys.end = begin + p.chunk;
  }
#endif
  if (keys.end < keys.begin) keys.end = keys.begin;
  return keys;
}
// That of query row i of sequence b.
ATTNPACK_HD static inline Range key_range(const AttentionParams& p, int64_t b, int64_t i) {
  return keys_at(p, i + first_position(p, b), valid_keys(p, b));
}

// Takes the rules away by which key_range differs from all keys.
ATTNPACK_HD static inline void drop_ranges(AttentionParams& p) {
  p.causal = false;
  p.window_left = p.window_right = -1;
  p.chunk = 0;
  p.kv_lens = nullptr;
}

// The kernels cut the keys of a sequence into pieces that begin at multiples of some divisor of it. So results keep
// their bits where whole multiples of it are taken away before the first key that is seen.
constexpr int64_t kKeyAlignment = 256;

// The keys that causality, window, chunk and kv_lens leave to the rows of sequence b together, from a multiple of
// kKeyAlignment on. How work is cut depends on them, but not on the keys before them.
ATTNPACK_HD static inline Range seen_keys(const AttentionParams& p, int64_t b) {
  const int64_t queries = count_queries(p, b);
  if (queries == 0) return {0, 0};
  const Range last = key_range(p, b, queries - 1);
  const int64_t valid = valid_keys(p, b), end = last.end < valid ? last.end : valid;
  const int64_t first = key_range(p, b, 0).begin, begin = first < end ? first : end;
  return {begin / kKeyAlignment * kKeyAlignment, end};
}

// The number of key j of a call in its sequence.
ATTNPACK_HD static inline int64_t key_number(const AttentionParams& p, int64_t j) {
  if (!p.selected.given) return j;
  const int64_t row = p.selected.skipped + j;
  return p.block_table[row / p.page_size] * p.page_size + row % p.page_size;
}

// The place of the score of key 0 among all scores [batch, num_heads, q_len, kv_len].
ATTNPACK_HD static inline uint64_t first_score(const AttentionParams& p, int64_t b, int64_t head, int64_t query) {
  if (p.selected.given) return static_cast<uint64_t>(p.selected.first_score) + head * p.selected.scores_of_head;
  return ((static_cast<uint64_t>(b) * p.num_heads + head) * p.q_len + query) * p.kv_len;
}

// The factor scale / softcap of a product before tanh. It is clamped to finite numbers, so that a product of 0 stays 0.
template <class A>
ATTNPACK_HD static inline A scale_into_cap(const AttentionParams& p) {
  constexpr double kMost = sizeof(A) == sizeof(double) ? DBL_MAX : FLT_MAX;
  const double ratio = p.scale / p.softcap;
  return static_cast<A>(ratio > kMost ? kMost : ratio < -kMost ? -kMost : ratio);
}

ATTNPACK_HD static inline int64_t group_size(const AttentionParams& p, int64_t kv_head) {
  return p.group_start ? p.group_start[kv_head + 1] - p.group_start[kv_head] : p.num_heads / p.num_kv_heads;
}

ATTNPACK_HD static inline int64_t group_head(const AttentionParams& p, int64_t kv_head, int64_t member) {
  return p.group_start ? p.group_heads[p.group_start[kv_head] + member]
                       : kv_head * (p.num_heads / p.num_kv_heads) + member;
}

}  // namespace attnpack
