#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/weights/detail/gguf_header.h>
#include <attnpack/weights/detail/gguf_types.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace attnpack {

// A tensor as the header of a GGUF file describes it.
struct GgufTensor {
  std::vector<int64_t> shape;  // rows first, as in torch
  uint32_t type;               // a ggml_type
  uint64_t offset;             // from the start of the file
  uint64_t row_bytes;

  int64_t rows() const;  // of the last dim
  uint64_t bytes() const { return rows() * row_bytes; }
};

// A whole little-endian GGUF file of version 2 or 3 whose header has been checked
// (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Raises c10::ValueError, a sentence that names the file.
class GgufFile {
 public:
  explicit GgufFile(std::string path, GgufOtherTypes others = {});

  const std::string& path() const { return path_; }
  // The metadata, in the order of the file.
  const Json::Object& metadata() const { return metadata_; }
  // Where each of them stands in the file.
  const std::vector<GgufHeader::Place>& metadata_places() const { return places_; }
  // The value of that key; none if the file lacks it.
  const Json* find(std::string_view key) const;
  const std::map<std::string, GgufTensor>& tensors() const { return tensors_; }
  // The names of the tensors, in the order of the file.
  const std::vector<std::string>& names() const { return names_; }
  const GgufTensor& tensor(const std::string& name) const;
  bool has(const std::string& name) const { return tensors_.count(name); }
  uint64_t alignment() const { return alignment_; }

  // Raises unless the file says that it is a whole model.
  void check_model() const;
  // Rows of a tensor as the file holds them, [rows, blocks, bytes] uint8, on memory that is mapped from the file. None
  // for a type that is not multiplied as it is stored. Raises for a scale that is not finite.
  std::optional<at::Tensor> blocks(const std::string& name, int64_t first, int64_t rows) const;
  // Widens a tensor into `out` (any floating dtype and device) piece by piece: as many rows of the last dim as `out`
  // has, from row `first` on; of a vector the numbers from `first` on.
  void read(const std::string& name, const at::Tensor& out, int64_t first = 0) const;

 private:
  void add_tensor(const GgufHeader::Tensor& described, const GgufBlock& block, uint64_t at);
  void check_rows(const std::string& name, int64_t first, int64_t rows) const;

  std::string path_;
  GgufOtherTypes others_;
  std::unique_ptr<File> file_;
  Json::Object metadata_;
  std::vector<GgufHeader::Place> places_;
  std::map<std::string_view, size_t> keys_;  // their places in metadata_
  std::map<std::string, GgufTensor> tensors_;
  std::vector<std::string> names_;
  uint64_t alignment_ = 32;
};

}  // namespace attnpack
