#include <attnpack/ops/stored_linear.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/stored_layout.h>

#include <algorithm>
#include <tuple>
#include <vector>

namespace attnpack {

bool is_stored(const Tensor& weight) {
  return weight.defined() && weight.scalar_type() == at::kByte && weight.dim() == 3;
}

const StoredLayout& stored_layout(const char* name, const Tensor& weight) {
  ATTNPACK_CHECK(is_stored(weight), name, ": got ", weight.scalar_type(), " of shape ", weight.sym_sizes(),
                 ", want stored weights [out, blocks, bytes] of uint8: attnpack.convert.quantize_ makes them");
  for (const StoredLayout& layout : kStoredLayouts)
    if (layout.bytes == weight.size(2)) return layout;
  std::string sizes;
  for (const StoredLayout& layout : kStoredLayouts)
    sizes += text_of({sizes.empty() ? "" : ", ", layout.bytes, " (", layout.name, ")"});
  ATTNPACK_CHECK(false, name, ": got blocks of ", weight.size(2), " bytes, want ", sizes);
}

const StoredLayout& widened_layout(const Tensor& blocks, at::ScalarType dtype) {
  const StoredLayout& layout = stored_layout("blocks", blocks);
  ATTNPACK_CHECK(is_element(dtype), "dtype: got ", dtype, ", want a float dtype");
  return layout;
}

int64_t stored_inputs(const Tensor& weight) { return weight.size(1) * stored_layout("weight", weight).numbers; }

void check_stored_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const int64_t inputs = stored_inputs(weight);
  const auto dtype = input.scalar_type();
  ATTNPACK_CHECK(is_element(dtype), "input has dtype ", dtype, ", wants a float dtype: call .float() on it");
  ATTNPACK_CHECK(input.dim() >= 1 && input.sym_size(-1) == inputs, "input has shape ", input.sym_sizes(),
                 ", wants [..., ", inputs, "]: the rows of weight hold so many numbers");
  ATTNPACK_CHECK(!bias || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)), "bias has shape ",
                 bias->sym_sizes(), ", wants [", weight.sym_size(0), "] as weight has so many rows");
  ATTNPACK_CHECK(!bias || bias->scalar_type() == dtype, "input has dtype ", dtype, ", bias ", bias->scalar_type(),
                 ": cast one of them with .to()");
  const auto device = input.device();
  ATTNPACK_CHECK(weight.device() == device && (!bias || bias->device() == device), "input is on ", device,
                 ", weight on ", weight.device(), ", bias on ", bias ? bias->device() : weight.device(),
                 ": move them to one device");
}

Tensor stored_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                     std::optional<bool> round_input) {
  static const DispatchedOp<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, std::optional<bool>)> op(
      "attnpack::stored_linear");
  return op(input, weight, bias, round_input);
}

std::vector<Tensor> stored_linears(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  static const DispatchedOp<decltype(stored_linears)> op("attnpack::stored_linears");
  return op(input, weights, biases);
}

Tensor widen_stored(const Tensor& blocks, at::ScalarType dtype) {
  static const DispatchedOp<Tensor(const Tensor&, at::ScalarType)> op("attnpack::widen_stored");
  return op(blocks, dtype);
}

Tensor stored_rows(const Tensor& table, const Tensor& ids, at::ScalarType dtype) {
  const auto& layout = stored_layout("table", table);
  const Tensor rows = at::embedding(table.flatten(1), ids.flatten()).unflatten(-1, {table.size(1), layout.bytes});
  auto shape = ids.sym_sizes().vec();
  shape.push_back(table.size(1) * layout.numbers);
  return widen_stored(rows, dtype).view_symint(shape);
}

namespace {

// The numbers that the one of the largest size may become, in units of the scale. Which scale leaves the smallest
// squared error depends on the other numbers of the block. With 4 bits codes are -8 to 7: 8 uses all of them.
std::vector<double> tried_sizes(int64_t bits) {
  if (bits == 4) return {-8, -7.6, -7.2, -6.8, 8, 7.6, 7.2, 6.8};
  std::vector<double> sizes;
  for (double size = 127; size > 119; size -= 0.5) sizes.push_back(size);
  return sizes;
}

constexpr double kSmallestHalf = 0x1p-24, kSmallestNormalHalf = 0x1p-14;

// A scale in fp16. Below 2^-14 it is rounded away from zero, to a multiple of 2^-24: rounded to the nearest one, it
// would cut off the largest code, or turn a block of small numbers into zeros.
Tensor to_half(const Tensor& scale) {
  const Tensor size = scale.abs(), up = (size / kSmallestHalf).ceil() * kSmallestHalf;
  return at::where(size < kSmallestNormalHalf, up.copysign(scale), scale).to(at::kHalf);
}

// Scales in fp16 [rows, blocks, 1] and codes in fp32 of numbers [rows, blocks, 32].
std::tuple<Tensor, Tensor> nearest_codes(const Tensor& blocks, int64_t bits) {
  const Tensor largest = blocks.gather(-1, blocks.abs().argmax(-1, /*keepdim=*/true));
  const double lowest = bits == 8 ? -127 : -8, highest = bits == 8 ? 127 : 7;
  Tensor scale, codes, error;
  for (const double size : tried_sizes(bits)) {
    const Tensor tried = to_half((bits == 8 ? largest.abs() : largest) / size), step = tried.to(at::kFloat);
    const Tensor rounded = at::where(step == 0, 0.0, blocks / step).round_().clamp_(lowest, highest);
    const Tensor wrong = (rounded * step - blocks).square_().sum(-1, /*keepdim=*/true);
    if (!scale.defined()) {
      scale = tried, codes = rounded, error = wrong;
      continue;
    }
    const Tensor better = wrong < error;
    scale = at::where(better, tried, scale), codes = at::where(better, rounded, codes);
    error = at::where(better, wrong, error);
  }
  return {scale, codes};
}

// Raises for a weight that is all but lost: a step of 2^-24 is the smallest, and the largest number is below the
// largest code of such steps. Then small blocks beside large ones move by at most half a step of the largest block.
void check_large_enough(const Tensor& weight, int64_t bits) {
  if (weight.is_meta() || weight.numel() == 0) return;
  const auto [lowest, highest] = weight.detach().aminmax();
  const double largest = at::maximum(-lowest, highest).item<double>(), wanted = (bits == 8 ? 127 : 8) * kSmallestHalf;
  ATTNPACK_CHECK(largest == 0 || !(largest < wanted), "weight: its largest number is ", largest, ", too small for a ",
                 "scale of fp16 (want at least ", wanted, ", 2^-24 times the largest code); multiply it by a power of ",
                 "two, or leave this layer out");
}

}  // namespace

Tensor to_stored(const Tensor& weight, int64_t bits) {
  ATTNPACK_CHECK(bits == 8 || bits == 4, "bits: got ", bits, ", want 8 or 4");
  ATTNPACK_CHECK(weight.dim() == 2 && is_element(weight.scalar_type()), "weight: got ", weight.scalar_type(),
                 " of shape ", weight.sizes(), ", want numbers [out, in]");
  ATTNPACK_CHECK(weight.size(1) > 0 && weight.size(1) % kRoundedBlock == 0, "weight: got rows of ", weight.size(1),
                 " numbers, want a multiple of ", kRoundedBlock, ", the numbers of a block");
  check_large_enough(weight, bits);
  const auto stored = [&](const Tensor& rows) {
    const Tensor blocks = rows.to(at::kFloat).unflatten(-1, {-1, kRoundedBlock});
    const auto [scale, codes] = nearest_codes(blocks, bits);
    ATTNPACK_CHECK(
        weight.is_meta() || scale.isfinite().all().item<bool>(),
        "weight: has numbers that are not finite, or too large for a scale of fp16 (65504 times the largest ",
        "code); leave this layer out");
    const Tensor bytes = bits == 8 ? codes.to(at::kChar).view(at::kByte) : (codes + 8).to(at::kByte);
    const Tensor packed = bits == 8 ? bytes : bytes.narrow(-1, 0, 16) + bytes.narrow(-1, 16, 16) * 16;
    return at::cat({scale.contiguous().view(at::kByte), packed}, -1);
  };
  constexpr int64_t kNumbers = 64 << 10;  // of rows that are tried together, so that a cache holds them
  const auto parts = weight.detach().split(std::max<int64_t>(1, kNumbers / weight.size(1)));
  std::vector<Tensor> pieces;
  for (const Tensor& part : parts) pieces.push_back(stored(part));
  return pieces.size() == 1 ? pieces.front() : at::cat(pieces);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("stored_linear(Tensor input, Tensor weight, Tensor? bias, bool? round_input) -> Tensor");
  m.def("stored_linears(Tensor input, Tensor[] weights, Tensor[] biases) -> Tensor[]");
  m.def("widen_stored(Tensor blocks, ScalarType dtype) -> Tensor");
}
