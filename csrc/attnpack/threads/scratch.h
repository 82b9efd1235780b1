#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace attnpack {

// The working memory of one thread. Up to kReservedBytes bytes of it are kept between calls, so that a small call
// allocates nothing. A thread may have one ThreadScratch per Slot alive at a time.
template <int Slot>
class ThreadScratch {
 public:
  explicit ThreadScratch(size_t bytes) : kept_(bytes <= kReservedBytes) {
    if (!kept_) {
      data_ = allocate(bytes);
      return;
    }
    static thread_local Buffer buffer;
    if (buffer.size < bytes) {
      std::free(buffer.data);
      buffer = {};  // if allocate throws, the next call finds nothing
      buffer.data = allocate(bytes);
      buffer.size = bytes;
    }
    data_ = buffer.data;
  }
  ~ThreadScratch() {
    if (!kept_) std::free(data_);
  }
  ThreadScratch(const ThreadScratch&) = delete;
  ThreadScratch& operator=(const ThreadScratch&) = delete;
  void* data() const { return data_; }

 private:
  static constexpr size_t kReservedBytes = size_t{4} << 20;
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static void* allocate(size_t bytes) {
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!data) throw std::bad_alloc();
    return data;
  }
  bool kept_;
  void* data_;
};

}  // namespace attnpack
