#pragma once

#include <attnpack/ops/cuda/kernels/launchers.h>
#include <attnpack/ops/cuda/kernels/sm90/key_gradient_sm90.cuh>
#include <attnpack/ops/cuda/kernels/sm90/query_gradient_sm90.cuh>
#include <attnpack/ops/cuda/kernels/sm90/tile_map.cuh>

namespace attnpack::cuda {

template <class S, int Width, int Values, Scores Kind>
__global__ void __launch_bounds__(WarpgroupQueryGradient<S, Width, Values, Kind>::kThreads, 1)
    query_gradient_kernel(const __grid_constant__ AttentionBackwardParams bp, const __grid_constant__ BackwardPlan plan,
                          const __grid_constant__ TileMap key_map, const __grid_constant__ TileMap value_map,
                          void* workspace) {
  extern __shared__ __align__(1024) unsigned char shared[];
  query_gradient_sm90_block<S, Width, Values, Kind>(bp, plan, key_map, value_map, workspace, blockIdx.x, shared);
}

template <class S, int Width, int Values, Scores Kind>
__global__ void __launch_bounds__(WarpgroupKeyGradient<S, Width, Values, Kind>::kThreads, 1)
    key_gradient_kernel(const __grid_constant__ AttentionBackwardParams bp, const __grid_constant__ BackwardPlan plan,
                        const __grid_constant__ TileMap key_map, const __grid_constant__ TileMap value_map,
                        const __grid_constant__ TileMap query_map, const __grid_constant__ TileMap out_map,
                        void* workspace) {
  extern __shared__ __align__(1024) unsigned char shared[];
  key_gradient_sm90_block<S, Width, Values, Kind>(bp, plan, key_map, value_map, query_map, out_map, workspace,
                                                  blockIdx.x, shared);
}

template <class S, int Width, int Values, Scores Kind>
const char* launch_gradients(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace, int device,
                             void* stream) {
  using Rows = WarpgroupQueryGradient<S, Width, Values, Kind>;
  using Keys = WarpgroupKeyGradient<S, Width, Values, Kind>;
  const AttentionParams& p = bp.forward;
  TileMap steps_of_keys, steps_of_values, keys, values, queries, outs;
  const char* error = nullptr;
  const auto make = [&](TileMap& map, const void* base, const Strides& s, int64_t heads, int64_t rows, int64_t width,
                        int box_rows) {
    if (!error) error = make_tile_map(map, p.dtype, base, tile_shape(s, p.batch, heads, rows, width), box_rows);
  };
  constexpr int kOwners = Rows::kOwners, kKeys = Rows::kStep, kRows = Keys::kStep;
  make(steps_of_keys, p.key, p.key_strides, p.num_kv_heads, p.kv_len, p.head_dim, kKeys);
  make(steps_of_values, p.value, p.value_strides, p.num_kv_heads, p.kv_len, p.v_head_dim, kKeys);
  make(keys, p.key, p.key_strides, p.num_kv_heads, p.kv_len, p.head_dim, kOwners);
  make(values, p.value, p.value_strides, p.num_kv_heads, p.kv_len, p.v_head_dim, kOwners);
  make(queries, p.query, p.query_strides, p.num_heads, p.q_len, p.head_dim, kRows);
  make(outs, bp.grad_out, bp.grad_out_strides, p.num_heads, p.q_len, p.v_head_dim, kRows);
  if (!error)
    error = launch(query_gradient_kernel<S, Width, Values, Kind>, plan.of_rows.blocks, Rows::kThreads,
                   sizeof(typename Rows::Shared), device, stream, bp, plan, steps_of_keys, steps_of_values, workspace);
  if (!error) error = sum_query_gradient(bp, plan, workspace, device, stream);
  if (!error)
    error = launch(key_gradient_kernel<S, Width, Values, Kind>, plan.of_keys.blocks, Keys::kThreads,
                   sizeof(typename Keys::Shared), device, stream, bp, plan, keys, values, queries, outs, workspace);
  if (!error) error = sum_key_gradient(bp, plan, workspace, device, stream);
  return error;
}

template <Scores Kind>
const char* launch_backward_sm90(const AttentionBackwardParams& bp, const BackwardPlan& plan, void* workspace,
                                 int device, void* stream) {
  return with_half_storage(bp.forward.dtype, [&](auto storage) {
    using S = decltype(storage);
    if constexpr (Kind == Scores::kAny)
      return plan.width == 64 ? launch_gradients<S, 64, 64, Kind>(bp, plan, workspace, device, stream)
                              : launch_gradients<S, 128, 128, Kind>(bp, plan, workspace, device, stream);
    else
      return plan.width == 64    ? launch_gradients<S, 64, 64, Kind>(bp, plan, workspace, device, stream)
             : plan.width == 128 ? launch_gradients<S, 128, 128, Kind>(bp, plan, workspace, device, stream)
                                 : launch_gradients<S, 192, 128, Kind>(bp, plan, workspace, device, stream);
  });
}

}  // namespace attnpack::cuda
