#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace attnpack {

// The bytes of a GGUF file of version 3, key by key and tensor by tensor.
class GgufBytes {
 public:
  explicit GgufBytes(size_t alignment = 32) : alignment_(alignment) {}

  template <typename T>
  static std::string bytes_of(T number) {
    return {reinterpret_cast<const char*>(&number), sizeof(number)};
  }
  static std::string text(const std::string& words) { return bytes_of<uint64_t>(words.size()) + words; }

  // A key with a value of that type as the file has it.
  GgufBytes& add(const std::string& key, uint32_t type, const std::string& value) {
    keys_ += text(key) + bytes_of(type) + value;
    ++num_keys_;
    return *this;
  }
  GgufBytes& add(const std::string& key, uint32_t value) { return add(key, 4, bytes_of(value)); }
  GgufBytes& add(const std::string& key, float value) { return add(key, 6, bytes_of(value)); }
  GgufBytes& add(const std::string& key, bool value) { return add(key, 7, bytes_of(value)); }
  GgufBytes& add(const std::string& key, const char* words) { return add(key, 8, text(words)); }

  // A tensor of those sizes, rows first, in that ggml_type.
  GgufBytes& add_tensor(const std::string& name, std::vector<int64_t> shape, uint32_t type, const std::string& bytes) {
    infos_ += text(name) + bytes_of<uint32_t>(shape.size());
    for (size_t i = shape.size(); i-- > 0;) infos_ += bytes_of<uint64_t>(shape[i]);
    infos_ += bytes_of(type) + bytes_of<uint64_t>(data_.size());
    data_ += bytes;
    pad(data_);
    ++num_tensors_;
    return *this;
  }
  // In fp32.
  GgufBytes& add_tensor(const std::string& name, const at::Tensor& numbers) {
    const auto rows = numbers.detach().to(at::kFloat).contiguous();
    return add_tensor(name, numbers.sizes().vec(), 0, {static_cast<const char*>(rows.data_ptr()), rows.nbytes()});
  }

  std::string bytes() const {
    auto head = "GGUF" + bytes_of<uint32_t>(3) + bytes_of(num_tensors_) + bytes_of(num_keys_) + keys_ + infos_;
    pad(head);
    return head + data_;
  }

 private:
  void pad(std::string& bytes) const { bytes.resize((bytes.size() + alignment_ - 1) / alignment_ * alignment_); }

  size_t alignment_;
  std::string keys_, infos_, data_;
  uint64_t num_keys_ = 0, num_tensors_ = 0;
};

}  // namespace attnpack
