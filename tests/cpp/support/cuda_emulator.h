#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include <attnpack/ops/cuda/kernels/index.h>
#include <attnpack/ops/cuda/kernels/numbers.cuh>

#include "guarded.h"

// A block of CUDA threads on one CPU thread, so that host tests run the kernels' own source. Each thread is a fiber
// that runs until it reaches a collective operation. The emulation is stricter than the hardware where it can be. The
// order of the threads is drawn. Warps run far ahead of others. Asynchronous copies land only when they are waited for,
// and until then their target holds garbage. Not modelled: the memory of caches, speed, and PTX itself.
#define ATTNPACK_EMULATED_DEVICE
#define ATTNPACK_DEVICE inline
#define ATTNPACK_DEVICE_CALL inline

namespace attnpack::cuda {

class EmulatedBlock {
 public:
  enum State { kRunnable, kAtWarp, kAtBlock, kDone };
  struct Slot {
    char bytes[32];
  };
  struct Copy {
    void* to;
    const void* from;
    bool valid;
  };
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state = kRunnable;
    int operation = 0;    // which collective it waits at: all threads of a warp or block must wait at the same one
    Slot own, published;  // its operands there; published: as its peers see them
    bool any = false;     // the block's vote
    std::vector<std::vector<Copy>> copies;  // groups of copies under way; the last one is still open
  };

  static EmulatedBlock*& current() {
    static EmulatedBlock* block = nullptr;
    return block;
  }

  EmulatedBlock(int threads, uint64_t seed) : random_(seed), fibers_(threads) {
    for (auto& fiber : fibers_) fiber.stack.reset(new char[kStack]);
  }

  void run(const std::function<void()>& body) {
    current() = this;
    body_ = &body;
    for (auto& fiber : fibers_) {
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = &scheduler_;
      fiber.state = kRunnable;
      fiber.copies.assign(1, {});
      makecontext(&fiber.context, &EmulatedBlock::enter, 0);
    }
    while (run_some()) {
    }
    current() = nullptr;
  }

  int id() const { return active_; }
  Fiber& me() { return fibers_[active_]; }
  const Slot& peer(int lane) const { return fibers_[active_ / 32 * 32 + lane].published; }

  // Waits for the warp or the block.
  void wait_for_others(State where, int operation) {
    me().state = where;
    me().operation = operation;
    swapcontext(&me().context, &scheduler_);
  }
  template <class T>
  void bring(const T& x) {
    static_assert(sizeof(T) <= sizeof(Slot));
    std::memcpy(me().own.bytes, &x, sizeof x);
  }
  template <class T>
  T brought_by(int lane) const {
    T x;
    std::memcpy(&x, peer(lane).bytes, sizeof x);
    return x;
  }
  // Either NaN, which also shows where it is multiplied with 0, or large numbers, for which the kernels do not try once
  // more.
  void fill_garbage(void* at, size_t bytes) { std::memset(at, random_() % 2 ? 0xff : 0x48, bytes); }

 private:
  static constexpr size_t kStack = 256 << 10, kLanes = 32;

  static void enter() {
    (*current()->body_)();
    for (const auto& group : current()->me().copies)
      if (!group.empty()) current()->fail("a thread ends with copies under way: they land in what comes after");
    current()->me().state = kDone;
  }

  [[noreturn]] void fail(const char* why) {
    std::fprintf(stderr, "emulated block: %s\n", why);
    std::abort();
  }

  // Runs a warp as far as its next collective, or all warps past a barrier. Warps have no common pace. Between two
  // barriers, either each warp goes all the way before the next one moves, in drawn order, or they take turns of drawn
  // lengths. So the first warp is a whole stretch ahead of the last one. If a barrier is missing, the first warp can
  // spoil what the others have yet to read, or read what they have yet to write.
  bool run_some() {
    std::vector<size_t> warps;  // warps that can move: a warp's threads are released together
    for (size_t w = 0; w < fibers_.size(); w += kLanes)
      if (fibers_[w].state == kRunnable) warps.push_back(w);
    if (warps.empty()) {
      if (release(0, fibers_.size(), kAtBlock)) {
        turns_ = random_() % 2;
        return true;
      }
      for (auto& fiber : fibers_)
        if (fiber.state != kDone) fail("some threads wait for others that never come");
      return false;
    }
    if (fibers_[warp_].state != kRunnable || (turns_ && random_() % 8 == 0)) warp_ = warps[random_() % warps.size()];
    std::iota(order_.begin(), order_.end(), static_cast<int>(warp_));
    std::shuffle(order_.begin(), order_.end(), random_);
    for (int i : order_) {
      active_ = i;
      swapcontext(&scheduler_, &fibers_[i].context);
    }
    release(warp_, kLanes, kAtWarp);
    return true;
  }

  bool release(size_t first, size_t count, State state) {
    bool any = false;
    for (size_t i = first; i < first + count; ++i) {
      if (fibers_[i].state != state) return false;
      any |= state == kAtBlock && fibers_[i].own.bytes[0];
    }
    for (size_t i = first; i < first + count; ++i) {
      auto& fiber = fibers_[i];
      if (fiber.operation != fibers_[first].operation) fail("threads wait at different operations");
      fiber.published = fiber.own;
      fiber.any = any;
      fiber.state = kRunnable;
    }
    return true;
  }

  std::mt19937_64 random_;
  bool turns_ = false;
  size_t warp_ = 0;  // the first thread of the warp that moves
  std::vector<Fiber> fibers_;
  std::array<int, kLanes> order_;
  ucontext_t scheduler_;
  const std::function<void()>* body_ = nullptr;
  int active_ = 0;
};

inline EmulatedBlock& emulated() { return *EmulatedBlock::current(); }

inline int thread_id() { return emulated().id(); }
inline bool any_in_block(bool x) {
  emulated().bring(x);
  emulated().wait_for_others(EmulatedBlock::kAtBlock, 1);
  return emulated().me().any;
}
inline void sync_block() {
  emulated().bring(false);
  emulated().wait_for_others(EmulatedBlock::kAtBlock, 2);
}
inline void sync_warp() { emulated().wait_for_others(EmulatedBlock::kAtWarp, 7); }
template <class T>
T shuffle_xor(T x, int mask) {
  emulated().bring(x);
  emulated().wait_for_others(EmulatedBlock::kAtWarp, 3);
  return emulated().brought_by<T>((thread_id() % 32) ^ mask);
}

inline void copy_async(void* shared, const void* global, bool valid) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 || (valid && reinterpret_cast<uintptr_t>(global) % 16)) std::abort();
  emulated().fill_garbage(shared, 16);
  emulated().me().copies.back().push_back({shared, global, valid});
}
inline void copy_async_commit() { emulated().me().copies.emplace_back(); }
template <int Pending>
void copy_async_wait() {
  auto& groups = emulated().me().copies;
  while (groups.size() > Pending + 1) {
    for (const auto& copy : groups.front())
      if (copy.valid)
        std::memcpy(copy.to, copy.from, 16);
      else
        std::memset(copy.to, 0, 16);
    groups.erase(groups.begin());
  }
}

inline uint32_t emulated_pair(const uint16_t* low, const uint16_t* high) {
  return static_cast<uint32_t>(*low) | static_cast<uint32_t>(*high) << 16;
}
inline void load_matrices(uint32_t (&to)[4], const void* row) {
  emulated().bring(row);
  emulated().wait_for_others(EmulatedBlock::kAtWarp, 4);
  const int lane = thread_id() % 32;
  for (int m = 0; m < 4; ++m) {
    const auto* at = static_cast<const uint16_t*>(emulated().brought_by<const void*>(8 * m + lane / 4)) + lane % 4 * 2;
    to[m] = emulated_pair(at, at + 1);
  }
}
inline void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
  emulated().bring(row);
  emulated().wait_for_others(EmulatedBlock::kAtWarp, 5);
  const int lane = thread_id() % 32;
  for (int m = 0; m < 4; ++m) {
    const auto at = [&](int r) {
      return static_cast<const uint16_t*>(emulated().brought_by<const void*>(8 * m + r)) + lane / 4;
    };
    to[m] = emulated_pair(at(lane % 4 * 2), at(lane % 4 * 2 + 1));
  }
}

struct EmulatedOperands {
  uint32_t a[4], b[2];
};
template <class S>
float emulated_half(uint32_t reg, int half) {
  return widen(S{static_cast<uint16_t>(reg >> 16 * half)});
}
// The fragments as the PTX ISA draws them for mma.m16n8k16, written without the maps of index.h.
template <class S>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated().bring(EmulatedOperands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  emulated().wait_for_others(EmulatedBlock::kAtWarp, 6);
  const int group = thread_id() % 32 / 4, in_group = thread_id() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1);
    for (int k = 0; k < 16; ++k) {
      const auto left = emulated().brought_by<EmulatedOperands>(row % 8 * 4 + k % 8 / 2);
      const auto right = emulated().brought_by<EmulatedOperands>(column * 4 + k % 8 / 2);
      c[i] += emulated_half<S>(left.a[(row >= 8) + 2 * (k >= 8)], k % 2) * emulated_half<S>(right.b[k >= 8], k % 2);
    }
  }
}

inline float power_of_two(float x) { return std::exp2(x); }

// Every block finds garbage in its shared memory.
template <class Shared, class Body>
void run_blocks(int64_t blocks, int threads, uint64_t seed, const Body& body) {
  EmulatedBlock block(threads, seed);
  Guarded shared((sizeof(Shared) + 15) / 16 * 16);
  for (int64_t i = 0; i < blocks; ++i) {
    block.fill_garbage(shared.data(), shared.bytes());
    block.run([&] { body(i, shared.data()); });
  }
}

}  // namespace attnpack::cuda
