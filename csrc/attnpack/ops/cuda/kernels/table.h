#pragma once

#include <attnpack/core/params.h>
#include <attnpack/core/quantized.h>
#include <attnpack/ops/cuda/kernels/plan.h>

// The table of functions that libattnpack_cuda offers. That library knows nothing of torch: it reads params structs,
// pointers and a stream. So nvcc compiles it without torch's headers, and it fits every torch. Loading it sets the
// table and asks no device for anything. Without it, or where the driver or the device is too old for it, CUDA tensors
// run through compositions of ATen ops.
namespace attnpack {

// Writes new keys and values after the positions that a cache holds, rotates keys and queries on the way if `rotates`,
// and adds to lengths. Strides are in elements. The cache is one tensor, or pools of pages with a table.
struct PlaceParams {
  int64_t batch, tokens, new_positions;  // tokens: of all sequences; new_positions: of each, without cu_seqlens
  int64_t num_heads, num_kv_heads, head_dim, v_head_dim, capacity;  // num_heads: of query; 0 without one
  DType dtype;                                                      // only if it rotates
  int32_t element_size;
  bool rotates, interleaved;
  int64_t half;  // rotated pairs, at most kMostRopeHalf
  double factor;
  const double* inv_freq;  // [half]
  const void *query, *key, *value;
  void *rotated, *cache_key, *cache_value;
  Strides query_strides, key_strides, value_strides, rotated_strides, cache_key_strides, cache_value_strides;
  const int64_t* lengths;  // [batch], lengths_stride apart, written
  int64_t lengths_stride;
  const int64_t* dropped;  // [batch], dropped_stride apart, or null
  int64_t dropped_stride;
  const int64_t* new_lens;     // [batch] or null: new_positions
  const int64_t* cu_seqlens;   // [batch + 1] or null: where the packed rows of each sequence begin
  const int32_t* block_table;  // [batch, max_pages], rows table_stride apart, or null; then `batch` of a cache's
                               // strides is the step of a page
  int64_t table_stride, page_size, num_pages;
};
constexpr int64_t kMostRopeHalf = 256;

// Results of quantize for rows (core/quantized.h): bytes of numbers, numbers of bytes, or numbers rotated as rows of 4
// bits are.
enum class RowsTo : int32_t { kBytes, kNumbers, kRotated };
constexpr int64_t kMostQuantizedDim = 1024;

// out = x with its first 2 * half dims rotated by cos and sin. All are [batch, head, row, column] by strides.
struct RopeParams {
  int64_t batch, num_heads, length, dim, half;
  DType dtype;
  bool interleaved, wide_tables;  // wide_tables: cos and sin are fp64
  const void *x, *cos, *sin;
  void* out;
  Strides x_strides, out_strides, cos_strides, sin_strides;
};

struct CudaKernels {
  // All functions but `usable`, the plans and `capability` return null, or a sentence about the error.
  bool (*usable)(int device);  // usable.h says when; asked once per device
  cuda::ForwardPlan (*plan)(const AttentionParams&, int64_t most_group, int device);
  const char* (*forward)(const AttentionParams&, const cuda::ForwardPlan&, void* workspace, int device, void* stream);
  // Whether a kernel reads the keys where they are: in pages, or as quantised rows.
  bool (*reads_source)(const AttentionParams&, int64_t most_group, int device);
  cuda::BackwardPlan (*plan_backward)(const AttentionBackwardParams&, int64_t most_group, int device);
  const char* (*backward)(const AttentionBackwardParams&, const cuda::BackwardPlan&, void* workspace, int device,
                          void* stream);
  const char* (*place)(const PlaceParams&, int device, void* stream);
  const char* (*quantize)(const QuantizeParams&, RowsTo, int64_t rows, int device, void* stream);
  const char* (*rope)(const RopeParams&, int device, void* stream);
  const char* (*linear)(const LinearParams&, int device, void* stream);
  int (*capability)(int device);  // 10 * major + minor of the compute capability
};

void set_cuda_kernels(const CudaKernels* kernels);
const CudaKernels* cuda_kernels(int device);  // null where no kernels can run on the device

}  // namespace attnpack
