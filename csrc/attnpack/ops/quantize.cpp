#include <attnpack/ops/quantize.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/core/quantized.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

void check_bits(int64_t bits) { ATTNPACK_CHECK(bits == 8 || bits == 4, "bits: got ", bits, ", want 8 or 4"); }

// x [..., dim] times H / sqrt(size) in groups of hadamard_size(dim).
Tensor rotated(const Tensor& x) {
  const int64_t dim = x.size(-1), size = hadamard_size(dim);
  Tensor y = x;
  for (int64_t half = 1; half < size; half *= 2) {
    const Tensor pairs = y.reshape({-1, 2, half});
    const Tensor a = pairs.select(1, 0), b = pairs.select(1, 1);
    y = at::stack({a + b, a - b}, 1);
  }
  return y.reshape(x.sizes()) / std::sqrt(static_cast<double>(size));
}

// [..., dim] in blocks [..., blocks, kQuantizedBlock], with zeros after the last number.
Tensor in_blocks(const Tensor& x) {
  const int64_t dim = x.size(-1), blocks = quantized_blocks(dim);
  return at::constant_pad_nd(x, {0, blocks * kQuantizedBlock - dim}).unflatten(-1, {blocks, kQuantizedBlock});
}

// The numbers of the last block that share bytes.
int64_t half_of(int64_t count) { return (count + 1) / 2; }

// Integers [..., blocks, kQuantizedBlock] of 4 bits as bytes [..., code_bytes(4, dim)].
Tensor packed_halves(const Tensor& codes, int64_t dim) {
  std::vector<Tensor> parts;
  for (int64_t begin = 0, block = 0; begin < dim; begin += kQuantizedBlock, ++block) {
    const int64_t count = std::min(kQuantizedBlock, dim - begin), half = half_of(count);
    const Tensor part = codes.select(-2, block), low = part.narrow(-1, 0, half);
    const Tensor high = at::cat({part.narrow(-1, half, count - half), part.narrow(-1, half - 1, 2 * half - count)}, -1);
    parts.push_back(low + high * 16);
  }
  return at::cat(parts, -1);
}

Tensor unpacked_halves(const Tensor& bytes, int64_t dim) {
  std::vector<Tensor> parts;
  for (int64_t begin = 0; begin < dim; begin += kQuantizedBlock) {
    const int64_t count = std::min(kQuantizedBlock, dim - begin), half = half_of(count);
    const Tensor part = bytes.narrow(-1, begin / 2, half);
    parts.push_back(at::bitwise_and(part, 15));
    parts.push_back(at::bitwise_right_shift(part.narrow(-1, 0, count - half), 4));
  }
  return at::cat(parts, -1);
}

}  // namespace

c10::SymInt sym_quantized_row_bytes(int64_t bits, const c10::SymInt& dim) {
  const c10::SymInt blocks = (dim + (kQuantizedBlock - 1)) / kQuantizedBlock;
  return (bits == 8 ? dim : (dim + 1) / 2) + blocks * 2;
}

void check_quantize_rows(const Tensor& x, int64_t bits) {
  check_bits(bits);
  ATTNPACK_CHECK(is_element(x.scalar_type()), "x has dtype ", x.scalar_type(), ", wants a float dtype: call .float()");
  ATTNPACK_CHECK(x.dim() >= 1 && x.sym_size(-1) >= 1, "x has shape ", x.sym_sizes(), ", wants [..., dim]");
}

void check_dequantize_rows(const Tensor& rows, int64_t bits, const c10::SymInt& dim, at::ScalarType dtype) {
  check_bits(bits);
  ATTNPACK_CHECK(is_element(dtype), "dtype: got ", dtype, ", want a float dtype");
  ATTNPACK_CHECK(dim >= 1, "dim: got ", dim, ", want how many numbers a row holds");
  ATTNPACK_CHECK(rows.scalar_type() == at::kByte, "rows has dtype ", rows.scalar_type(),
                 ", wants uint8, as quantize_rows gives");
  const auto bytes = sym_quantized_row_bytes(bits, dim);
  ATTNPACK_CHECK(rows.dim() >= 1 && rows.sym_size(-1) == bytes, "rows has shape ", rows.sym_sizes(), ", wants [..., ",
                 bytes, "] for ", dim, " numbers of ", bits, " bits");
}

Tensor quantize_rows(const Tensor& x, int64_t bits) {
  static const DispatchedOp<decltype(quantize_rows)> op("attnpack::quantize_rows");
  return op(x, bits);
}

Tensor dequantize_rows(const Tensor& rows, int64_t bits, const c10::SymInt& dim, at::ScalarType dtype) {
  static const DispatchedOp<Tensor(const Tensor&, int64_t, c10::SymInt, at::ScalarType)> op(
      "attnpack::dequantize_rows");
  return op(rows, bits, dim, dtype);
}

Tensor quantize_rows_formula(const Tensor& x, int64_t bits) {
  check_quantize_rows(x, bits);
  const int64_t dim = x.size(-1);
  const Tensor numbers = x.to(at::kFloat), blocks = in_blocks(bits == 8 ? numbers : rotated(numbers));
  const Tensor place = blocks.abs().argmax(-1, /*keepdim=*/true), largest = blocks.gather(-1, place);
  const Tensor scale = (bits == 8 ? largest.abs() / 127 : largest / -8).to(at::kHalf), step = scale.to(at::kFloat);
  const Tensor whole = at::where(step == 0, at::zeros_like(blocks), blocks / step).round();
  const int64_t least = bits == 8 ? -127 : -8, most = bits == 8 ? 127 : 7;
  const Tensor codes = at::nan_to_num(whole, static_cast<double>(least)).clamp(least, most).to(at::kShort);
  const Tensor bytes =
      bits == 8 ? at::bitwise_and(codes, 255).flatten(-2).narrow(-1, 0, dim) : packed_halves(codes + 8, dim);
  return at::cat({bytes.to(at::kByte), scale.squeeze(-1).contiguous().view(at::kByte)}, -1);
}

Tensor dequantize_rows_formula(const Tensor& rows, int64_t bits, const c10::SymInt& sym_dim, at::ScalarType dtype) {
  check_dequantize_rows(rows, bits, sym_dim, dtype);
  const int64_t dim = sym_dim.guard_int(__FILE__, __LINE__), bytes = code_bytes(bits, dim);
  const Tensor codes = rows.narrow(-1, 0, bytes);
  const Tensor scale = rows.narrow(-1, bytes, rows.size(-1) - bytes).contiguous().view(at::kHalf).to(at::kFloat);
  const Tensor whole =
      bits == 8 ? codes.contiguous().view(at::kChar).to(at::kFloat) : unpacked_halves(codes, dim).to(at::kFloat) - 8;
  const Tensor numbers = (in_blocks(whole) * scale.unsqueeze(-1)).flatten(-2).narrow(-1, 0, dim);
  return (bits == 8 ? numbers : rotated(numbers)).to(dtype);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("quantize_rows(Tensor x, int bits) -> Tensor");
  m.def("dequantize_rows(Tensor rows, int bits, SymInt dim, ScalarType dtype) -> Tensor");
}
