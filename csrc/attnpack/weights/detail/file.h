#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace attnpack {

// An open file of the disk, for reading. Errors of the system are raised as std::system_error.
class File {
 public:
  explicit File(const std::string& path);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  uint64_t size() const { return size_; }
  // Fills out[0..size). Raises a c10::ValueError if the file ends before.
  void read_at(uint64_t offset, void* out, uint64_t size) const;
  // The whole file, mapped for as long as the pointer lives. Writes to it change only this process's copy of a page.
  std::shared_ptr<char> map() const;

 private:
  int descriptor_;
  uint64_t size_ = 0;
};

// A file's bytes; raises a c10::ValueError if it has more than `most`.
std::string read_bounded(const std::string& path, uint64_t most);

bool is_file(const std::string& path);

// The error that the last failed call of the system left in errno.
[[noreturn]] void raise_system_error();

}  // namespace attnpack
