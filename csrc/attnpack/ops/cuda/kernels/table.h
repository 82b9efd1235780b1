#pragma once

#include <attnpack/core/params.h>
#include <attnpack/ops/cuda/kernels/plan.h>

// What libattnpack_cuda offers. That library knows nothing of torch: it reads params structs, pointers and a stream, is
// compiled by nvcc alone and fits every torch. Loading it puts its table in place and asks no device for anything;
// without it, or where the driver or the device is too old for it, CUDA tensors run through compositions of ATen ops.
namespace attnpack {

// Which memory to write at: positions behind what a cache holds.
struct AppendParams {
  int64_t batch, num_kv_heads, new_positions, capacity, row_bytes;
  const void* from;
  void* to;
  Strides from_strides, to_strides;  // in bytes; rows are whole
  const int64_t* lengths;            // [batch], lengths_stride apart: before the append
  int64_t lengths_stride;
  const int64_t* new_lens;  // [batch] or null: new_positions
};

// out = x, its first 2 * half dims rotated by cos and sin; all [batch, head, row, column] by strides.
struct RopeParams {
  int64_t batch, num_heads, length, dim, half;
  DType dtype;
  bool interleaved, wide_tables;  // wide_tables: cos and sin are fp64
  const void *x, *cos, *sin;
  void* out;
  Strides x_strides, out_strides, cos_strides, sin_strides;
};

struct CudaKernels {
  // All but these two return null, or a sentence about what went wrong.
  bool (*usable)(int device);  // whether its driver and its generation (sm_80 and later) are new enough
  cuda::ForwardPlan (*plan)(const AttentionParams&, int64_t most_group, int device);
  const char* (*forward)(const AttentionParams&, const cuda::ForwardPlan&, void* workspace, int device, void* stream);
  const char* (*backward)(const AttentionBackwardParams&, int64_t most_group, int device, void* stream);
  const char* (*append)(const AppendParams&, int device, void* stream);
  const char* (*rope)(const RopeParams&, int device, void* stream);
  const char* (*linear)(const LinearParams&, int device, void* stream);
};

void set_cuda_kernels(const CudaKernels* kernels);
const CudaKernels* cuda_kernels(int device);  // null where there are none that can run there

}  // namespace attnpack
