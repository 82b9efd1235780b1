#pragma once

#include <attnpack/ops/cuda/kernels/device.cuh>
#include <attnpack/ops/cuda/kernels/numbers.cuh>

namespace attnpack::cuda {

constexpr int kLinearThreads = 128, kLinearRows = 2;  // kLinearRows: rows that share one reading of the weight

// The numbers that a lane reads at once: 16 bytes where rows begin and end at multiples of 16 bytes, else one number.
template <class S, int Count>
struct alignas(Count * sizeof(S)) Chunk {
  S x[Count];
};

// A warp computes one output. It goes through the output's row of the weight once for each kLinearRows rows of input.
template <class S, int Count>
ATTNPACK_DEVICE void linear_output(const LinearParams& p, int64_t output) {
  using LaneChunk = Chunk<S, Count>;
  const int lane = thread_id() % kWarp;
  const S *weight = static_cast<const S*>(p.weight) + output * p.weight_stride, *input = static_cast<const S*>(p.input);
  for (int64_t first = 0; first < p.rows; first += kLinearRows) {
    float sum[kLinearRows] = {};
    // Rows after the last one repeat it, so that the loop has no condition and several loads are under way.
    const S* row[kLinearRows];
#pragma unroll
    for (int r = 0; r < kLinearRows; ++r) row[r] = input + (first + r < p.rows ? first + r : p.rows - 1) * p.inputs;
#pragma unroll 4
    for (int64_t i = lane * Count; i < p.inputs; i += kWarp * Count) {
      const LaneChunk w = *reinterpret_cast<const LaneChunk*>(weight + i);
#pragma unroll
      for (int r = 0; r < kLinearRows; ++r) {
        const LaneChunk x = *reinterpret_cast<const LaneChunk*>(row[r] + i);
#pragma unroll
        for (int n = 0; n < Count; ++n) sum[r] += widen(w.x[n]) * widen(x.x[n]);
      }
    }
#pragma unroll
    for (int r = 0; r < kLinearRows; ++r) {
      const float total = warp_sum(sum[r]);
      if (lane == 0 && first + r < p.rows)
        narrow(total + (p.bias ? widen(static_cast<const S*>(p.bias)[output]) : 0.f),
               static_cast<S*>(p.out) + (first + r) * p.outputs + output);
    }
  }
}

template <class S>
ATTNPACK_DEVICE void linear_block(const LinearParams& p, int64_t block) {
  constexpr int kCount = 16 / sizeof(S);
  const int64_t output = block * (kLinearThreads / kWarp) + thread_id() / kWarp;
  if (output >= p.outputs) return;
  const auto whole = [](const void* base, int64_t stride) {
    return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride % kCount == 0;
  };
  if (whole(p.weight, p.weight_stride) && whole(p.input, p.inputs))
    linear_output<S, kCount>(p, output);
  else
    linear_output<S, 1>(p, output);
}

}  // namespace attnpack::cuda
