#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/core/stored.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// The types of the numbers in GGUF files (ggml_type in
// https://github.com/ggml-org/ggml/blob/master/include/ggml.h).
namespace attnpack {

// Numbers and bytes of a block.
struct GgufBlock {
  uint64_t numbers, bytes;
};

// Functions for the types that this library does not widen. Python gives those of the package gguf, C++ gives none.
struct GgufOtherTypes {
  // Raises for a type that it cannot widen either.
  std::function<std::pair<uint64_t, uint64_t>(uint32_t type)> block;
  // [rows, bytes] uint8 -> [rows, numbers] fp32
  std::function<at::Tensor(uint32_t type, const at::Tensor& bytes)> widen;
};

// "Q4_0"; for an unknown type its number.
std::string gguf_type_name(uint32_t type);

// Raises a c10::ValueError that begins with `path` for a type that cannot be widened.
GgufBlock gguf_block(const std::string& path, uint32_t type, const GgufOtherTypes& others);

// The numbers of rows of that type.
at::Tensor widen_gguf(uint32_t type,                  //
                      const at::Tensor& bytes,        // [rows, bytes] uint8, contiguous
                      const GgufOtherTypes& others);  // -> [rows, numbers] fp32

// The format of a type that is multiplied as it is stored; none for the others.
const StoredLayout* gguf_stored_layout(uint32_t type);

// Whether all scales and offsets of so many blocks are finite.
bool are_scales_finite(const StoredLayout& layout, const char* blocks, uint64_t count);

}  // namespace attnpack
