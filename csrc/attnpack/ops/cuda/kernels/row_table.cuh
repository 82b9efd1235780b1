#pragma once

#include <attnpack/ops/cuda/kernels/device.cuh>
#include <attnpack/ops/cuda/kernels/score.cuh>

namespace attnpack::cuda {

// Fills a table with `count` rows from `first` on. Afterwards every thread of the block sees the table.
ATTNPACK_DEVICE void fill_rows(const AttentionParams& p, int64_t b, int64_t kv_head, int64_t first, int64_t count,
                               Row* rows) {
  sync_block();
  if (thread_id() < count) rows[thread_id()] = make_row(p, b, kv_head, first + thread_id());
  sync_block();
}

}  // namespace attnpack::cuda
