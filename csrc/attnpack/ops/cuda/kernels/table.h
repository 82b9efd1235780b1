#pragma once

#include <attnpack/core/params.h>
#include <attnpack/ops/cuda/kernels/plan.h>

// The table of functions that libattnpack_cuda offers. That library knows nothing of torch: it reads params structs,
// pointers and a stream. So nvcc alone compiles it, and it fits every torch. Loading it sets the table and asks no
// device for anything. Without it, or where the driver or the device is too old for it, CUDA tensors run through
// compositions of ATen ops.
namespace attnpack {

// Writes new positions after the ones that a cache holds.
struct AppendParams {
  int64_t batch, num_kv_heads, new_positions, capacity, row_bytes;
  const void* from;
  void* to;
  Strides from_strides, to_strides;  // in bytes; each row is contiguous
  const int64_t* lengths;            // [batch], lengths_stride apart: lengths before the append
  int64_t lengths_stride;
  const int64_t* new_lens;  // [batch] or null: new_positions
};

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
  // All functions but `usable` and `plan` return null, or a sentence about the error.
  bool (*usable)(int device);  // whether driver and device (sm_80 or later) are new enough
  cuda::ForwardPlan (*plan)(const AttentionParams&, int64_t most_group, int device);
  const char* (*forward)(const AttentionParams&, const cuda::ForwardPlan&, void* workspace, int device, void* stream);
  const char* (*backward)(const AttentionBackwardParams&, int64_t most_group, int device, void* stream);
  const char* (*append)(const AppendParams&, int device, void* stream);
  const char* (*rope)(const RopeParams&, int device, void* stream);
  const char* (*linear)(const LinearParams&, int device, void* stream);
};

void set_cuda_kernels(const CudaKernels* kernels);
const CudaKernels* cuda_kernels(int device);  // null where no kernels can run on the device

}  // namespace attnpack
