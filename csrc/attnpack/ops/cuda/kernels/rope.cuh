#pragma once

#include <attnpack/ops/cuda/kernels/table.h>
#include <attnpack/ops/cuda/kernels/device.cuh>

namespace attnpack::cuda {

constexpr int kRopeThreads = 64;

ATTNPACK_HD inline int64_t offset_of(const Strides& s, int64_t b, int64_t head, int64_t row) {
  return b * s.batch + head * s.head + row * s.row;
}

// One row: pairs (i, i + half), or (2i, 2i + 1) if interleaved (Su et al. 2021, section 3.4.2).
template <class S, class Table>
ATTNPACK_DEVICE void rotate_row(const RopeParams& p, int64_t block) {
  using A = typename Accumulation<S>::type;
  const int64_t row = block % p.length, head = block / p.length % p.num_heads, b = block / p.length / p.num_heads;
  const S* from = static_cast<const S*>(p.x) + offset_of(p.x_strides, b, head, row);
  S* to = static_cast<S*>(p.out) + offset_of(p.out_strides, b, head, row);
  const Table* cos = static_cast<const Table*>(p.cos) + offset_of(p.cos_strides, b, head, row);
  const Table* sin = static_cast<const Table*>(p.sin) + offset_of(p.sin_strides, b, head, row);
  const int64_t step = p.interleaved ? 2 : 1, partner = p.interleaved ? 1 : p.half;
  for (int64_t i = thread_id(); i < p.half; i += kRopeThreads) {
    const A first = widen(from[i * step * p.x_strides.column]),
            second = widen(from[(i * step + partner) * p.x_strides.column]);
    const A c = static_cast<A>(cos[i * p.cos_strides.column]), s = static_cast<A>(sin[i * p.sin_strides.column]);
    narrow(first * c - second * s, to + i * step * p.out_strides.column);
    narrow(second * c + first * s, to + (i * step + partner) * p.out_strides.column);
  }
  for (int64_t d = 2 * p.half + thread_id(); d < p.dim; d += kRopeThreads)
    to[d * p.out_strides.column] = from[d * p.x_strides.column];
}

}  // namespace attnpack::cuda
