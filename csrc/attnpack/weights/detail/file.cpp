#include <attnpack/weights/detail/file.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

void raise_system_error() { throw std::system_error(errno, std::generic_category()); }

File::File(const std::string& path) : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  // O_NONBLOCK: a pipe that nobody writes would wait here for ever.
  if (descriptor_ < 0) raise_system_error();
  struct stat status;
  const int failed = fstat(descriptor_, &status) < 0 ? errno : S_ISDIR(status.st_mode) ? EISDIR : 0;
  const bool regular = !failed && S_ISREG(status.st_mode);
  if (!regular) close(descriptor_);
  if (failed) throw std::system_error(failed, std::generic_category());
  refuse_unless(regular, "it is no file with data, but a pipe or a device");
  size_ = status.st_size;
}

File::~File() { close(descriptor_); }

void File::read_at(uint64_t offset, void* out, uint64_t size) const {
  auto* to = static_cast<char*>(out);
  while (size > 0) {
    const auto count = pread(descriptor_, to, size, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) raise_system_error();
    refuse_unless(count > 0, "the file ended while it was read");
    to += count, offset += count, size -= count;
  }
}

std::shared_ptr<char> File::map() const {
  // Not reserved: a file may be larger than the memory, and hardly any page is ever written.
  auto* start = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor_, 0);
  if (start == MAP_FAILED) raise_system_error();
  return {static_cast<char*>(start), [size = size_](char* mapped) { munmap(mapped, size); }};
}

std::string read_bounded(const std::string& path, uint64_t most) {
  const File file(path);
  refuse_unless(file.size() <= most, "it has more than ", most, " bytes");
  std::string bytes(file.size(), '\0');
  file.read_at(0, bytes.data(), bytes.size());
  return bytes;
}

bool is_file(const std::string& path) {
  std::error_code error;
  return path.find('\0') == std::string::npos && std::filesystem::is_regular_file(path, error);
}

}  // namespace attnpack
