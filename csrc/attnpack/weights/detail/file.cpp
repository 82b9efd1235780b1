#include <attnpack/weights/detail/file.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

void raise_system_error() { throw std::system_error(errno, std::generic_category()); }

namespace {

// The words for a file of that mode, which follow its name or "it".
std::string words_for(mode_t mode) {
  if (S_ISDIR(mode)) return "is a directory";
  if (S_ISFIFO(mode)) return "is a named pipe";
  return S_ISSOCK(mode) ? "is a socket" : "is a device";
}

constexpr const char* kWantsFile = ", wants a readable file with data: put one in its place";

}  // namespace

File::File(const std::string& path) : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  // O_NONBLOCK: a pipe that nobody writes would wait here for ever.
  if (descriptor_ < 0) raise_system_error();
  struct stat status;
  const int failed = fstat(descriptor_, &status) < 0 ? errno : 0;
  const bool regular = !failed && S_ISREG(status.st_mode);
  if (!regular) close(descriptor_);
  if (failed) throw std::system_error(failed, std::generic_category());
  refuse_unless(regular, "it ", words_for(status.st_mode), kWantsFile);
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
  const std::lock_guard lock(mapping_);
  if (mapped_) return mapped_;
  // Not reserved: a file may be larger than the memory, and hardly any page is ever written.
  auto* start = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor_, 0);
  if (start == MAP_FAILED) raise_system_error();
  mapped_ = std::shared_ptr<char>(static_cast<char*>(start), [size = size_](char* mapped) { munmap(mapped, size); });
  return mapped_;
}

std::string read_bounded(const std::string& path, uint64_t most) {
  const File file(path);
  refuse_unless(file.size() <= most, "it has more than ", most, " bytes");
  std::string bytes(file.size(), '\0');
  file.read_at(0, bytes.data(), bytes.size());
  return bytes;
}

std::string why_no_file(const std::string& path) {
  struct stat status;
  const bool is_name = path.find('\0') == std::string::npos;
  if (is_name && stat(path.c_str(), &status) == 0) return S_ISREG(status.st_mode) ? "" : words_for(status.st_mode);
  if (!is_name || errno == ENOENT || errno == ENOTDIR) return kNoSuchFile;
  return text_of({"cannot be read (", std::generic_category().message(errno), ")"});
}

bool is_file(const std::string& path) {
  const auto why = why_no_file(path);
  refuse_unless(why.empty() || why == kNoSuchFile, path, ": ", why, kWantsFile);
  return why.empty();
}

}  // namespace attnpack
