#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace attnpack {

// A dtype of the safetensors format: its name, its size, and torch's type where torch has one.
struct StoredDtype {
  std::string_view name;
  int bits;
  std::optional<at::ScalarType> type;
};

inline constexpr StoredDtype kStoredDtypes[] = {
    {"F64", 64, at::kDouble},
    {"F32", 32, at::kFloat},
    {"F16", 16, at::kHalf},
    {"BF16", 16, at::kBFloat16},
    {"BOOL", 8, at::kBool},
    {"U8", 8, at::kByte},
    {"I8", 8, at::kChar},
    {"I16", 16, at::kShort},
    {"I32", 32, at::kInt},
    {"I64", 64, at::kLong},
    {"U16", 16, at::kUInt16},
    {"U32", 32, at::kUInt32},
    {"U64", 64, at::kUInt64},
    {"C64", 64, at::kComplexFloat},
    {"F8_E4M3", 8, at::kFloat8_e4m3fn},
    {"F8_E5M2", 8, at::kFloat8_e5m2},
    {"F8_E8M0", 8, at::kFloat8_e8m0fnu},
    {"F8_E4M3FNUZ", 8, at::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", 8, at::kFloat8_e5m2fnuz},
    {"F4", 4, std::nullopt},
    {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt},
};
// A model's weights may have only the first kWeightDtypes of the table.
inline constexpr int kWeightDtypes = 4;

}  // namespace attnpack
