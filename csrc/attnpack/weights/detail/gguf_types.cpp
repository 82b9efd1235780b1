#include <attnpack/weights/detail/gguf_types.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <string_view>

#include <attnpack/ops/stored_linear.h>
#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

namespace {

// By ggml_type; empty where ggml has none any more.
constexpr const char* kGgmlNames[] = {
    "F32",   "F16",    "Q4_0",  "Q4_1", "",     "",        "Q5_0",   "Q5_1",    "Q8_0",  "Q8_1",   "Q2_K",
    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S",
    "IQ2_S", "IQ4_XS", "I8",    "I16",  "I32",  "I64",     "F64",    "IQ1_M",   "BF16",  "",       "",
    "",      "TQ1_0",  "TQ2_0", "",     "",     "",        "MXFP4",  "NVFP4",   "Q1_0",
};

constexpr uint32_t kMxfp4 = 39;
constexpr GgufBlock kMxfp4Block{32, 17};

std::string_view ggml_name(uint32_t type) { return type < std::size(kGgmlNames) ? kGgmlNames[type] : ""; }

// The dtype of a type whose numbers torch has.
std::optional<at::ScalarType> plain_dtype(uint32_t type) {
  switch (type) {
    case 0:
      return at::kFloat;
    case 1:
      return at::kHalf;
    case 28:
      return at::kDouble;
    case 30:
      return at::kBFloat16;
    default:
      return std::nullopt;
  }
}

// Where a block has numbers in fp16: its scale, and its offset.
std::initializer_list<int> halves_of(StoredFormat format) {
  static constexpr std::initializer_list<int> kScale{0}, kScaleAndOffset{0, 2}, kLast{208};
  switch (format) {
    case StoredFormat::kQ4_1:
    case StoredFormat::kQ5_1:
    case StoredFormat::kQ4_K:
    case StoredFormat::kQ5_K:
      return kScaleAndOffset;
    case StoredFormat::kQ6_K:
      return kLast;
    default:
      return kScale;
  }
}

// Blocks of an exponent of two, biased by 127, and 16 bytes: the first 16 numbers in their low halves, the others in
// the high ones. Unlike the MXFP4 of OCP, the exponent 255 is a number.
at::Tensor widen_mxfp4(const at::Tensor& bytes) {
  constexpr int kTwice[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const auto blocks = bytes.size(1) / static_cast<int64_t>(kMxfp4Block.bytes);
  const auto numbers = at::empty({bytes.size(0), blocks * 32}, bytes.options().dtype(at::kFloat));
  const auto* from = bytes.const_data_ptr<uint8_t>();
  auto* to = numbers.mutable_data_ptr<float>();
  for (int64_t i = 0; i < bytes.size(0) * blocks; ++i, from += kMxfp4Block.bytes, to += 32) {
    const uint32_t exponent = from[0];
    const auto half = std::bit_cast<float>(exponent < 2 ? 0x00200000U << exponent : (exponent - 1) << 23);
    for (int k = 0; k < 16; ++k) {
      to[k] = half * static_cast<float>(kTwice[from[1 + k] & 15]);
      to[16 + k] = half * static_cast<float>(kTwice[from[1 + k] >> 4]);
    }
  }
  return numbers;
}

}  // namespace

std::string gguf_type_name(uint32_t type) {
  const auto name = ggml_name(type);
  return name.empty() ? std::to_string(type) : std::string(name);
}

const StoredLayout* gguf_stored_layout(uint32_t type) {
  const auto* found = std::find_if(std::begin(kStoredLayouts), std::end(kStoredLayouts),
                                   [name = ggml_name(type)](const auto& layout) { return layout.name == name; });
  return found == std::end(kStoredLayouts) ? nullptr : found;
}

GgufBlock gguf_block(const std::string& path, uint32_t type, const GgufOtherTypes& others) {
  if (const auto dtype = plain_dtype(type)) return {1, c10::elementSize(*dtype)};
  if (const auto* layout = gguf_stored_layout(type))
    return {static_cast<uint64_t>(layout->numbers), static_cast<uint64_t>(layout->bytes)};
  if (type == kMxfp4) return kMxfp4Block;
  const bool known = !ggml_name(type).empty(), removed = !known && type < std::size(kGgmlNames);
  const char* why = known     ? ", which C++ does not widen: Python may, by the package gguf"
                    : removed ? ", which ggml has removed"
                              : ", which is unknown here";
  refuse_unless(others.block && !removed, path, ": has tensors of type ", gguf_type_name(type), why,
                "; use a file of another type, such as Q8_0 or F16");
  const auto [numbers, bytes] = others.block(type);
  return {numbers, bytes};
}

at::Tensor widen_gguf(uint32_t type, const at::Tensor& bytes, const GgufOtherTypes& others) {
  if (const auto dtype = plain_dtype(type)) return bytes.view(*dtype).to(at::kFloat);
  if (const auto* layout = gguf_stored_layout(type))
    return widen_stored(bytes.view({bytes.size(0), -1, layout->bytes}), at::kFloat);
  return type == kMxfp4 ? widen_mxfp4(bytes) : others.widen(type, bytes);
}

bool are_scales_finite(const StoredLayout& layout, const char* blocks, uint64_t count) {
  constexpr uint16_t kExponent = 0x7c00;  // all ones in infinities and NaNs of fp16
  for (const int place : halves_of(layout.format)) {
    for (uint64_t i = 0; i < count; ++i) {
      uint16_t half;
      std::memcpy(&half, blocks + i * layout.bytes + place, sizeof(half));
      if ((half & kExponent) == kExponent) return false;
    }
  }
  return true;
}

}  // namespace attnpack
