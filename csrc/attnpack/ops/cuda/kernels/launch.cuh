#pragma once

#include <cuda_runtime.h>

#include <string>

#include <attnpack/ops/cuda/kernels/numbers.cuh>

// Launches a kernel on a params struct, and dispatches on the storage type.
namespace attnpack::cuda {

#define ATTNPACK_CUDA_CHECK(call)                                 \
  do {                                                            \
    if (const cudaError_t error = (call); error != cudaSuccess) { \
      cudaGetLastError();                                         \
      return cudaGetErrorString(error);                           \
    }                                                             \
  } while (0)

// An error that an earlier call left behind is raised here, once, as torch's checks raise it. Else nobody would see it.
inline const char* earlier_error() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess || error == cudaErrorNotReady) return nullptr;
  thread_local std::string words;
  words = std::string("a CUDA call before this one failed: ") + cudaGetErrorString(error);
  return words.c_str();
}

template <class Kernel, class... Arguments>
const char* launch(Kernel* kernel, int64_t blocks, int threads, int64_t shared_bytes, int device, void* stream,
                   const Arguments&... arguments) {
  if (blocks == 0) return nullptr;
  if (blocks > 0x7fffffff) return "the call has more blocks of work than a CUDA grid holds";
  if (const char* error = earlier_error()) return error;
  ATTNPACK_CUDA_CHECK(cudaSetDevice(device));
  if (shared_bytes > 48 * 1024)
    ATTNPACK_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  ATTNPACK_CUDA_CHECK(cudaGetLastError());
  return nullptr;
}

// Calls f with one value of the storage type.
template <class F>
const char* with_storage(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double{});
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(BFloat16{});
    default:
      return f(Float16{});
  }
}
template <class F>
const char* with_half_storage(DType dtype, F&& f) {
  return dtype == DType::kBFloat16 ? f(BFloat16{}) : f(Float16{});
}

}  // namespace attnpack::cuda
