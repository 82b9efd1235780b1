#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
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
  // The whole file, mapped by the first call, for as long as this or the pointer lives. Writes to it change only this
  // process's copy of a page.
  std::shared_ptr<char> map() const;

 private:
  int descriptor_;
  uint64_t size_ = 0;
  mutable std::mutex mapping_;  // guards mapped_
  mutable std::shared_ptr<char> mapped_;
};

// A file's bytes; raises a c10::ValueError if it has more than `most`.
std::string read_bounded(const std::string& path, uint64_t most);

inline constexpr const char* kNoSuchFile = "no such file";
// The reason why `path` is no file with data: kNoSuchFile, "is a named pipe", ... Empty if it is one.
std::string why_no_file(const std::string& path);
// Whether there is a file. Raises for what is there and is none: a caller would take it for absent.
bool is_file(const std::string& path);

// The error that the last failed call of the system left in errno.
[[noreturn]] void raise_system_error();

}  // namespace attnpack
