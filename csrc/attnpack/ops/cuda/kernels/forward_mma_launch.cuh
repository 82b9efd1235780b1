#pragma once

#include <type_traits>

#include <attnpack/ops/cuda/kernels/forward_mma.cuh>
#include <attnpack/ops/cuda/kernels/launch.cuh>

namespace attnpack::cuda {

using MmaKernel = void(const AttentionParams, const ForwardPlan, void* workspace);

// Kernels::get<S, Width>(): the kernel of RowWarps x KeyWarps warps for a storage type and padded head_dim.
template <class Kernels, int RowWarps, int KeyWarps>
const char* launch_forward(const AttentionParams& p, const ForwardPlan& plan, void* workspace, int device,
                           void* stream) {
  return with_half_storage(p.dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto of_width = [&](auto width) {
      using Tile = ForwardTile<S, RowWarps, KeyWarps, decltype(width)::value>;
      constexpr MmaKernel* kernel = Kernels::template get<S, decltype(width)::value>();
      return launch(kernel, plan.blocks, Tile::kThreads, sizeof(typename Tile::Shared), device, stream, p, plan,
                    workspace);
    };
    return plan.width == 64    ? of_width(std::integral_constant<int, 64>{})
           : plan.width == 128 ? of_width(std::integral_constant<int, 128>{})
                               : of_width(std::integral_constant<int, 256>{});
  });
}

}  // namespace attnpack::cuda
