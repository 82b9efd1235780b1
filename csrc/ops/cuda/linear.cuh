#pragma once

#include <attnpack/ops/cuda/device.cuh>
#include <attnpack/ops/cuda/numbers.cuh>

namespace attnpack::cuda {

constexpr int kLinearThreads = 128, kLinearRows = 4;  // rows that share one reading of the weight

// A warp has one output and goes through its row of the weight once for each kLinearRows rows of input.
template <class S>
ATTNPACK_DEVICE void linear_block(const LinearParams& p, int64_t block) {
  const int lane = thread_id() % kWarp;
  const int64_t output = block * (kLinearThreads / kWarp) + thread_id() / kWarp;
  if (output >= p.outputs) return;
  const S *weight = static_cast<const S*>(p.weight) + output * p.weight_stride, *input = static_cast<const S*>(p.input);
  for (int64_t first = 0; first < p.rows; first += kLinearRows) {
    float sum[kLinearRows] = {};
    for (int64_t i = lane; i < p.inputs; i += kWarp) {
      const float w = widen(weight[i]);
#pragma unroll
      for (int r = 0; r < kLinearRows; ++r)
        if (first + r < p.rows) sum[r] += w * widen(input[(first + r) * p.inputs + i]);
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

}  // namespace attnpack::cuda
