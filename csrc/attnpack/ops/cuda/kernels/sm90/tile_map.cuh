#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <attnpack/ops/cuda/kernels/sm90/tile_shape.h>
#include <attnpack/ops/cuda/kernels/launch.cuh>
#include <attnpack/ops/cuda/kernels/sm90/device_sm90.cuh>

// Makes the maps that copies of boxes need (device_sm90.cuh). The driver makes them. Its function is asked for at run
// time, so that nothing links the driver.
namespace attnpack::cuda {

using EncodeTiled = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                             const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled* find_encode_tiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) !=
      cudaSuccess)
#else
  if (cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result) != cudaSuccess)
#endif
    return nullptr;
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled*>(found) : nullptr;
}

// The map of a tensor for boxes of box_rows rows. Returns null, or a sentence about the error.
inline const char* make_tile_map(TileMap& map, DType dtype, const void* base, const TileShape& shape, int box_rows) {
  static EncodeTiled* const encode = find_encode_tiled();
  if (!encode) return "the CUDA driver has no cuTensorMapEncodeTiled: it is older than 12.0";
  cuuint64_t sizes[4], steps[3];
  for (int i = 0; i < 4; ++i) sizes[i] = static_cast<cuuint64_t>(shape.sizes[i]);
  for (int i = 0; i < 3; ++i) steps[i] = static_cast<cuuint64_t>(shape.steps[i]);
  const cuuint32_t box[4] = {kPanel, static_cast<cuuint32_t>(box_rows), 1, 1}, each[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             const_cast<void*>(base), sizes, steps, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused a tensor's sizes or strides";
}

}  // namespace attnpack::cuda
