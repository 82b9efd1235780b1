#pragma once

#include <attnpack/weights/detail/file.h>
#include <attnpack/weights/detail/json.h>

#include <cstdint>
#include <string>
#include <vector>

namespace attnpack {

// Limits of a header, so that a file that lies costs little. The largest vocabularies take half of them.
inline constexpr uint64_t kLongestGgufHeader = 64'000'000;  // bytes
inline constexpr uint64_t kMostGgufItems = 3'000'000;       // of all arrays together

// The header of a GGUF file, as it stands there.
struct GgufHeader {
  // Where a key stands with its value: its first byte, and the one behind the last.
  struct Place {
    uint64_t begin, end;
  };
  struct Tensor {
    std::string name;
    std::vector<uint64_t> shape;  // rows first
    uint32_t type;
    uint64_t at;  // from the start of the data
  };

  Json::Object metadata;
  std::vector<Place> places;  // of each key
  std::vector<Tensor> tensors;
  uint64_t alignment = 32;  // of each tensor in the file
  uint64_t end = 0;         // of the header, in bytes
};

// Raises a c10::ValueError for a header that breaks off, has a key twice, or is larger than the limits.
GgufHeader read_gguf_header(const std::string& path, const File& file);

// The next multiple of alignment.
inline uint64_t padded(uint64_t count, uint64_t alignment) { return (count + alignment - 1) / alignment * alignment; }

}  // namespace attnpack
