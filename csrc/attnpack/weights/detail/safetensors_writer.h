#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attnpack {

// A file to write, new: what stands at `path` already, a link too, is never opened. Errors of the system are raised as
// std::system_error.
class NewFile {
 public:
  explicit NewFile(const std::string& path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write_at(uint64_t offset, const void* bytes, uint64_t size) const;
  // Returns after the bytes are on the disk.
  void close();

 private:
  int descriptor_;
};

struct AnnouncedTensor {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype;
};

// A new .safetensors file. The constructor takes names, shapes and dtypes, write_tensor the tensors in any order.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, const std::vector<AnnouncedTensor>& tensors,
                    const std::map<std::string, std::string>& metadata);

  uint64_t size() const { return size_; }  // bytes of the data
  // Writes a tensor of any strides, which must have the announced shape and dtype.
  void write_tensor(const std::string& name, const at::Tensor& tensor);
  // Closes the file after it is on the disk; raises unless every tensor has been written.
  void close();

 private:
  struct Place {
    AnnouncedTensor announced;
    uint64_t begin;
    bool written = false;
  };

  std::string path_;
  NewFile file_;
  std::map<std::string, Place> places_;
  uint64_t start_ = 0, size_ = 0;
};

// Raises unless the format can hold the tensor's numbers.
void check_storable(const std::string& name, const at::Tensor& tensor);

}  // namespace attnpack
