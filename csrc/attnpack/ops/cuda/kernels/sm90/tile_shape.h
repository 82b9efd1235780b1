#pragma once

#include <cstdint>

#include <attnpack/core/params.h>

namespace attnpack::cuda {

// A [batch, heads, rows, columns] tensor of 16-bit numbers, as copies of boxes see it: columns first. A dimension
// without a step has size 1.
struct TileShape {
  int64_t sizes[4], steps[3];  // steps in bytes, of all but the columns
};
inline TileShape tile_shape(const Strides& s, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  const auto size = [](int64_t n, int64_t stride) { return stride ? n : 1; };
  const auto bytes = [](int64_t stride) { return stride ? 2 * stride : 16; };
  return {{columns, size(rows, s.row), size(heads, s.head), size(batch, s.batch)},
          {bytes(s.row), bytes(s.head), bytes(s.batch)}};
}

}  // namespace attnpack::cuda
