#pragma once

#include <cstddef>
#include <vector>

// Races between the threads of an emulated block. Under ThreadSanitizer each CUDA thread is a fiber of its own, and
// only barriers order what fibers do: shuffles, loads of matrices and products do not, as on hardware. ThreadSanitizer
// then reports every pair of accesses that no barrier orders, whatever the drawn schedule was. Elsewhere nothing
// happens.
#if defined(__SANITIZE_THREAD__)

#include <sanitizer/tsan_interface.h>

extern "C" {
void __tsan_write_range(void* at, long bytes);
void __tsan_read_range(void* at, long bytes);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
}

// The emulator's own state, which fibers and scheduler share.
#define ATTNPACK_UNSEEN __attribute__((no_sanitize("thread"), noinline))

namespace attnpack::cuda {

// While it lives, accesses by a fiber or the scheduler do not count as the kernels'.
struct Unseen {
  ATTNPACK_UNSEEN Unseen() { __tsan_ignore_thread_begin(); }
  ATTNPACK_UNSEEN ~Unseen() { __tsan_ignore_thread_end(); }
};

constexpr size_t kFiberStack = 2 << 20;
constexpr unsigned kNoOrder = __tsan_switch_to_fiber_no_sync;

class Races {
 public:
  void begin() { scheduler_ = __tsan_get_current_fiber(); }
  ATTNPACK_UNSEEN void enter_scheduler() { __tsan_switch_to_fiber(scheduler_, kNoOrder); }
  void end_fiber() { __tsan_release(&done_); }
  void end() { __tsan_acquire(&done_); }
  char* cell(size_t of, int phase) { return &cells_[of][phase & 1]; }
  char* cell(size_t of) { return &cells_[of][0]; }
  // The boxes that arrive at a barrier, without the threads that do.
  char* boxes(size_t of) { return &cells_[of][1]; }
  // The asynchronous proxy's view of shared memory: fenced stores.
  char* asynchronous_view() { return &view_; }

 private:
  void* scheduler_ = nullptr;
  // The warps' cells, then the block's; further on those of other barriers.
  char cells_[128][2] = {}, done_ = 0, view_ = 0;
};

// A CUDA thread, and the unit that makes its asynchronous copies. A copy comes after what the thread did before it
// started it, and before what the thread does after it has waited for the copy's group; nothing else orders it. A third
// fiber stands for the asynchronous proxy, by which products read shared memory: barriers do not order stores for it,
// only fences do.
class RaceFiber {
 public:
  // Orders all earlier accesses before those of the three fibers.
  ATTNPACK_UNSEEN void make() {
    void* const scheduler = __tsan_get_current_fiber();
    for (void** fiber : {&fiber_, &copier_, &proxy_}) {
      *fiber = take();
      __tsan_switch_to_fiber(*fiber, 0);
      __tsan_switch_to_fiber(scheduler, kNoOrder);
    }
    phases_[0] = phases_[1] = open_ = landed_ = open_products_ = landed_products_ = 0;
  }
  void destroy() { free().insert(free().end(), {fiber_, copier_, proxy_}); }
  // Before a fork: ThreadSanitizer counts fibers as threads, and looks for no races in the child of several.
  static void destroy_all() {
    for (void* fiber : free()) __tsan_destroy_fiber(fiber);
    free().clear();
  }
  ATTNPACK_UNSEEN void start_copy(void* to, const void* from, int bytes) {
    __tsan_release(&issued_);
    __tsan_switch_to_fiber(copier_, kNoOrder);
    __tsan_acquire(&issued_);
    __tsan_write_range(to, 16);
    if (bytes) __tsan_read_range(const_cast<void*>(from), bytes);
    __tsan_release(&groups_[open_ % kGroups]);
    __tsan_switch_to_fiber(fiber_, kNoOrder);
  }
  ATTNPACK_UNSEEN void close_group() { ++open_; }
  ATTNPACK_UNSEEN void land_group() { __tsan_acquire(&groups_[landed_++ % kGroups]); }
  // The thread's earlier accesses come first, then a box is written, then its barrier's phase ends.
  ATTNPACK_UNSEEN void write_box(void* to, int bytes, char* cell, char* boxes) {
    __tsan_release(&issued_);
    __tsan_switch_to_fiber(copier_, kNoOrder);
    __tsan_acquire(&issued_);
    __tsan_write_range(to, bytes);
    __tsan_release(cell);
    __tsan_release(boxes);
    __tsan_switch_to_fiber(fiber_, kNoOrder);
  }
  ATTNPACK_UNSEEN void fence_stores(char* view) { __tsan_release(view); }
  // Products read beside the thread, which waits for groups of them.
  ATTNPACK_UNSEEN void read_operand(const void* from, int bytes, char* view) {
    __tsan_release(&issued_);
    __tsan_switch_to_fiber(copier_, kNoOrder);
    __tsan_acquire(&issued_);
    __tsan_read_range(const_cast<void*>(from), bytes);
    __tsan_release(&products_[open_products_ % kGroups]);
    __tsan_switch_to_fiber(proxy_, kNoOrder);
    __tsan_acquire(view);
    __tsan_read_range(const_cast<void*>(from), bytes);
    __tsan_release(&products_[open_products_ % kGroups]);
    __tsan_switch_to_fiber(fiber_, kNoOrder);
  }
  ATTNPACK_UNSEEN void close_products() { ++open_products_; }
  ATTNPACK_UNSEEN void land_products() { __tsan_acquire(&products_[landed_products_++ % kGroups]); }
  // The proxy sees the boxes that its thread has waited for. Through the products' end the thread would else come after
  // boxes of which it knows nothing.
  ATTNPACK_UNSEEN void wait_for_boxes(Races& races, size_t cell) {
    acquire_cell(races, cell);
    __tsan_switch_to_fiber(proxy_, kNoOrder);
    __tsan_acquire(races.boxes(cell));
    __tsan_switch_to_fiber(fiber_, kNoOrder);
  }
  void release_cell(Races& races, size_t cell) { __tsan_release(races.cell(cell)); }
  void acquire_cell(Races& races, size_t cell) { __tsan_acquire(races.cell(cell)); }
  ATTNPACK_UNSEEN void enter() { __tsan_switch_to_fiber(fiber_, kNoOrder); }
  void release(Races& races, size_t cell, bool of_block) { __tsan_release(races.cell(cell, phases_[of_block])); }
  void acquire(Races& races, size_t cell, bool of_block) { __tsan_acquire(races.cell(cell, phases_[of_block]++)); }

 private:
  static constexpr int kGroups = 4;
  // Blocks take the fibers of earlier blocks: ThreadSanitizer writes 0.8 MB twice to make one.
  ATTNPACK_UNSEEN static std::vector<void*>& free() {
    static std::vector<void*> fibers;
    return fibers;
  }
  ATTNPACK_UNSEEN static void* take() {
    if (free().empty()) return __tsan_create_fiber(0);
    void* const fiber = free().back();
    free().pop_back();
    return fiber;
  }
  void *fiber_ = nullptr, *copier_ = nullptr, *proxy_ = nullptr;
  int phases_[2], open_, landed_, open_products_, landed_products_;
  char issued_ = 0, groups_[kGroups] = {}, products_[kGroups] = {};
};

}  // namespace attnpack::cuda

#else

#define ATTNPACK_UNSEEN

namespace attnpack::cuda {

constexpr size_t kFiberStack = 256 << 10;

struct Unseen {
  Unseen() {}
  ~Unseen() {}
};

struct Races {
  char* cell(size_t) { return nullptr; }
  char* boxes(size_t) { return nullptr; }
  char* asynchronous_view() { return nullptr; }
  void begin() {}
  void enter_scheduler() {}
  void end_fiber() {}
  void end() {}
};
struct RaceFiber {
  void make() {}
  void destroy() {}
  void enter() {}
  void start_copy(void*, const void*, int) {}
  void close_group() {}
  void land_group() {}
  void write_box(void*, int, char*, char*) {}
  void fence_stores(char*) {}
  void read_operand(const void*, int, char*) {}
  void close_products() {}
  void land_products() {}
  void wait_for_boxes(Races&, size_t) {}
  void release_cell(Races&, size_t) {}
  void acquire_cell(Races&, size_t) {}
  void release(Races&, size_t, bool) {}
  void acquire(Races&, size_t, bool) {}
};

}  // namespace attnpack::cuda

#endif
