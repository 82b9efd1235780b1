#include <attnpack/ops/detail/empty_result.h>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DispatchKeySet.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace attnpack {
namespace {

// Blocks of 2^k bytes. Their first 64 bytes say which k, the rest is the caller's.
constexpr size_t kHead = 64, kLeastBytes = 256, kMostBytes = 32 << 10;
constexpr int kLeastPower = std::countr_zero(kLeastBytes), kPowers = std::countr_zero(kMostBytes) - kLeastPower + 1;
constexpr size_t kMaxFreeBlocks = 16;  // of one size in each thread

// The free blocks of a thread. They are given back to the system when it ends.
struct FreeBlocks {
  std::array<std::vector<char*>, kPowers> of;
  ~FreeBlocks();
};
thread_local bool has_ended = false;
FreeBlocks::~FreeBlocks() {
  has_ended = true;
  for (auto& blocks : of)
    for (char* block : blocks) std::free(block);
}
FreeBlocks& free_blocks() {
  static thread_local FreeBlocks blocks;
  return blocks;
}

void give_back(void* data) {
  char* const block = static_cast<char*>(data) - kHead;
  int index;
  std::memcpy(&index, block, sizeof(index));
  if (!has_ended)
    if (auto& blocks = free_blocks().of[index]; blocks.size() < kMaxFreeBlocks) return blocks.push_back(block);
  std::free(block);
}

char* take_block(int index) {
  if (!has_ended)
    if (auto& blocks = free_blocks().of[index]; !blocks.empty()) {
      char* const block = blocks.back();
      blocks.pop_back();
      return block;
    }
  return static_cast<char*>(std::aligned_alloc(kHead, kLeastBytes << index));
}

class BlockAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    // The profiler counts the memory of torch's allocator.
    if (bytes == 0 || bytes > kMostBytes - kHead || c10::memoryProfilingEnabled())
      return c10::GetCPUAllocator()->allocate(bytes);
    const int power = static_cast<int>(std::bit_width(bytes + kHead - 1)), index = std::max(power - kLeastPower, 0);
    char* const block = take_block(index);
    if (!block) return c10::GetCPUAllocator()->allocate(bytes);
    std::memcpy(block, &index, sizeof(index));
    return {block + kHead, block + kHead, &give_back, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty(sizes, options);
  static auto* const allocator = new BlockAllocator;  // never destroyed: results may outlive all else
  constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CPU);
  return at::detail::empty_generic(sizes, allocator, kKeys, c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

at::Tensor empty_result_like(const at::Tensor& like) {
  if (!like.is_cpu() || !like.is_non_overlapping_and_dense()) return at::empty_like(like);
  at::Tensor result = empty_result(like.sizes(), like.options());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return result;
}

}  // namespace attnpack
