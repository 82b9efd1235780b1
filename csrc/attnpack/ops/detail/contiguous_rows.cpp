#include <attnpack/ops/detail/contiguous_rows.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

#include <attnpack/threads/threads.h>

namespace attnpack {
namespace {

using at::Tensor;

constexpr int64_t kBlockSide = 64;
constexpr int64_t kPaddedSide = kBlockSide + 16;  // numbers between the columns of a block

// Copies a block of `rows` x `columns` numbers: column c begins at from + c * apart, row r at to + r * width.
template <class T>
void transpose_block(const T* from, int64_t apart, int64_t rows, int64_t columns, T* to, int64_t width) {
  T block[kBlockSide * kPaddedSide];
  for (int64_t c = 0; c < columns; ++c) std::copy_n(from + c * apart, rows, block + c * kPaddedSide);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[r * width + c] = block[c * kPaddedSide + r];
}

template <class T>
void transpose_matrices(const Tensor& x, const Tensor& out) {
  const int64_t matrices = x.size(0) * x.size(1), rows = x.size(2), columns = x.size(3), apart = x.stride(3);
  const int64_t down = (rows + kBlockSide - 1) / kBlockSide, across = (columns + kBlockSide - 1) / kBlockSide;
  const auto* from = static_cast<const T*>(x.const_data_ptr());
  auto* to = static_cast<T*>(out.mutable_data_ptr());
  for_each_range(matrices * down * across, 1, [&](int64_t i, int64_t) {
    const int64_t matrix = i / across / down, row = i / across % down * kBlockSide, column = i % across * kBlockSide;
    const int64_t start = matrix / x.size(1) * x.stride(0) + matrix % x.size(1) * x.stride(1);
    transpose_block(from + start + column * apart + row, apart, std::min(kBlockSide, rows - row),
                    std::min(kBlockSide, columns - column), to + (matrix * rows + row) * columns + column, columns);
  });
}

}  // namespace

Tensor contiguous_rows(const Tensor& x) {
  const Tensor matrices = x.dim() == 2 ? x.unsqueeze(0).unsqueeze(0) : x.dim() == 3 ? x.unsqueeze(0) : x;
  const Tensor out = at::empty(matrices.sizes(), x.options());
  switch (x.element_size()) {
    case 1:
      transpose_matrices<uint8_t>(matrices, out);
      break;
    case 2:
      transpose_matrices<uint16_t>(matrices, out);
      break;
    case 4:
      transpose_matrices<uint32_t>(matrices, out);
      break;
    default:
      transpose_matrices<uint64_t>(matrices, out);
  }
  return out.view(x.sizes());
}

}  // namespace attnpack
