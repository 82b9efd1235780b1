#pragma once

#include <ATen/core/Tensor.h>

#include <attnpack/weights/detail/file.h>
#include <attnpack/weights/detail/json.h>
#include <attnpack/weights/detail/safetensors_dtypes.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace attnpack {

inline constexpr int64_t kMostTensors =
    100'000;  // of a checkpoint, so that a lie costs little; Llama 3.1 405B has 1,137

// A tensor as a file's header describes it.
struct StoredTensor {
  const StoredDtype* dtype;
  std::vector<uint64_t> shape;
  uint64_t begin, end;  // its bytes, from the start of the data
};

inline constexpr int64_t kChunk = 1 << 20;  // elements that are read at once

// Checks the header of a safetensors file with `size` bytes of data, and gives its tensors by name. Refuses what Rust's
// reader refuses, and names that stand twice. The order of the checks: dtype, shape and offsets are there; the dtype is
// known; the end lies in the data; no product of sizes overflows; begin <= end; bytes as dtype and shape need; no hole
// and no overlap.
std::map<std::string, StoredTensor> read_safetensors_header(const std::string& path, const Json& header, uint64_t size);

// Raises for more than kMostTensors.
void check_tensor_count(const std::string& path, int64_t count);

// A .safetensors file whose header has been checked (https://github.com/huggingface/safetensors).
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  bool has(const std::string& name) const { return tensors_.count(name); }

  // The dtype of a model's weight; raises if it is no floating one.
  at::ScalarType weight_dtype(const std::string& name) const;
  // The sizes; raises if one is too large for a tensor of torch.
  std::vector<int64_t> sizes(const std::string& name) const;

  // The tensor on the mapped file, which stays mapped while the tensor lives. It is copied if it does not begin at a
  // multiple of its element's size, and if it is bool.
  at::Tensor map(const std::string& name) const;
  // Copies a weight into `out` of its shape, converted piece by piece. No page of the file is mapped.
  void read(const std::string& name, const at::Tensor& out) const;
  // A weight's elements from `first` on, as stored: `most` of them or what is left, 1-D.
  at::Tensor elements(const std::string& name, int64_t first, int64_t most) const;

 private:
  const StoredTensor& tensor(const std::string& name) const;
  template <typename Call>
  auto reading(const std::string& name, const Call& call) const;

  std::string path_;
  std::unique_ptr<File> file_;
  uint64_t start_ = 0;  // of the data
  std::map<std::string, StoredTensor> tensors_;
};

}  // namespace attnpack
