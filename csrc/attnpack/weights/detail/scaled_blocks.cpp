#include <attnpack/weights/detail/scaled_blocks.h>

#include <ATen/ATen.h>

#include <algorithm>

#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

namespace {

using at::Tensor;

bool is_scale(const Tensor& scales) {
  const auto dtype = scales.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kFloat8_e8m0fnu;
}

// The 16 numbers of E2M1, by their bits: sign, two of the exponent, one of the mantissa.
Tensor e2m1_numbers(const at::Device& device) {
  const Tensor positive = at::tensor({0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F});
  return at::cat({positive, positive.neg()}).to(device);
}

}  // namespace

Tensor from_fp8(const Tensor& values, const Tensor& scales, const std::array<int64_t, 2>& block) {
  refuse_unless(values.scalar_type() == at::kFloat8_e4m3fn, "it is ", values.scalar_type(), ", wants F8_E4M3");
  refuse_unless(is_scale(scales), "its scales are ", scales.scalar_type(), ", want F32, BF16 or F8_E8M0");
  refuse_unless(values.dim() == 2, "it has ", values.dim(), " dims, wants 2");
  const auto rows = values.size(0), columns = values.size(1);
  // A block that reaches past the end is cut: the file says how large blocks are, and may lie.
  const auto height = std::min(block[0], std::max<int64_t>(rows, 1)),
             width = std::min(block[1], std::max<int64_t>(columns, 1));
  const auto row_blocks = (rows + height - 1) / height, column_blocks = (columns + width - 1) / width;
  refuse_unless(scales.sizes() == at::IntArrayRef({row_blocks, column_blocks}), "its scales have shape ",
                scales.sizes(), ", want [", row_blocks, ", ", column_blocks, "]");
  const Tensor result = at::empty(values.sizes(), values.options().dtype(at::kFloat));
  if (values.is_meta()) return result;
  const Tensor wide = scales.to(at::kFloat).repeat_interleave(width, 1).narrow(1, 0, columns);
  for (int64_t i = 0; i < row_blocks; ++i) {  // block by block, so that no scale is held for each number
    const auto first = i * height, count = std::min(height, rows - first);
    result.narrow(0, first, count).copy_(values.narrow(0, first, count)).mul_(wide[i]);
  }
  return result;
}

Tensor from_mxfp4(const Tensor& blocks, const Tensor& scales) {
  refuse_unless(blocks.scalar_type() == at::kByte, "its blocks are ", blocks.scalar_type(), ", want U8");
  refuse_unless(scales.scalar_type() == at::kByte, "its scales are ", scales.scalar_type(), ", want U8");
  refuse_unless(blocks.dim() > 1 && blocks.size(-1) == 16, "its blocks have shape ", blocks.sizes(),
                ", want 16 bytes each");
  refuse_unless(scales.sizes() == blocks.sizes().slice(0, blocks.dim() - 1), "its scales have shape ", scales.sizes(),
                ", want one for each of blocks ", blocks.sizes());
  const Tensor halves = at::stack({blocks.bitwise_and(15), blocks.bitwise_right_shift(4)}, -1);  // [..., G, 16, 2]
  const Tensor numbers = e2m1_numbers(blocks.device()).index_select(0, halves.to(at::kInt).flatten());
  const Tensor scale = scales.contiguous().view(at::kFloat8_e8m0fnu).to(at::kFloat);
  return numbers.view(halves.sizes()).flatten(-2).mul_(scale.unsqueeze(-1)).flatten(-2);
}

}  // namespace attnpack
