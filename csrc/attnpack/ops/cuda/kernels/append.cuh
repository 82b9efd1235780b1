#pragma once

#include <attnpack/ops/cuda/kernels/table.h>
#include <attnpack/ops/cuda/kernels/device.cuh>

namespace attnpack::cuda {

constexpr int kAppendThreads = 128;

// Appends one new position of one kv head. Positions beyond the capacity are dropped, so that no call waits for the
// device.
ATTNPACK_DEVICE void append_block(const AppendParams& p, int64_t block) {
  const int64_t position = block % p.new_positions, head = block / p.new_positions % p.num_kv_heads,
                b = block / p.new_positions / p.num_kv_heads;
  const int64_t held = p.lengths[b * p.lengths_stride];
  if (held < 0 || held >= p.capacity - position || position >= (p.new_lens ? p.new_lens[b] : p.new_positions)) return;
  const int64_t slot = held + position;
  const char* from = static_cast<const char*>(p.from) + b * p.from_strides.batch + head * p.from_strides.head +
                     position * p.from_strides.row;
  char* to = static_cast<char*>(p.to) + b * p.to_strides.batch + head * p.to_strides.head + slot * p.to_strides.row;
  if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(p.row_bytes)) % 8 ==
      0)
    for (int64_t i = thread_id(); i < p.row_bytes / 8; i += kAppendThreads)
      reinterpret_cast<uint64_t*>(to)[i] = reinterpret_cast<const uint64_t*>(from)[i];
  else
    for (int64_t i = thread_id(); i < p.row_bytes; i += kAppendThreads) to[i] = from[i];
}

}  // namespace attnpack::cuda
