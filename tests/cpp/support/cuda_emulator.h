#pragma once

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
#include <set>
#include <source_location>
#include <string>
#include <vector>

#include <attnpack/ops/cuda/kernels/index.h>
#include <attnpack/ops/cuda/kernels/numbers.cuh>

#include "context.h"
#include "cuda_barriers.h"
#include "cuda_races.h"
#include "guarded.h"
#include "widened.h"

// A block of CUDA threads on one CPU thread, so that host tests run the kernels' own source. Each thread is a fiber
// that runs until it reaches a collective operation. The emulation is stricter than the hardware where it can be. The
// order of the threads is drawn. Warps run far ahead of others. Asynchronous copies land only when they are waited for,
// and until then their target holds garbage. Misaligned addresses and bank conflicts are found. Under ThreadSanitizer
// races are found too (cuda_races.h). Not modelled: the memory of caches, speed, and PTX itself.
#define ATTNPACK_EMULATED_DEVICE
#define ATTNPACK_DEVICE inline
#define ATTNPACK_DEVICE_CALL inline

namespace attnpack::cuda {

// The place of a collective operation in the kernels' source. Tests leave one out, and see whether anybody notices.
using Site = std::source_location;
inline std::string name_of(const Site& at) {
  const std::string file = at.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(at.line());
}

class EmulatedBlock {
 public:
  enum State { kRunnable, kAtWarp, kAtBlock, kPolling, kDone };
  struct Slot {
    char bytes[32];
  };
  struct Copy {
    void* to;
    const void* from;
    int bytes;
  };
  struct Product {
    const void* sums;
    std::function<void()> run;
  };
  struct Stores {
    uintptr_t to;
    int bytes;
  };
  struct Fiber {
    Context context;
    std::unique_ptr<char[]> stack;
    State state = kRunnable;
    const Site* at = nullptr;  // the collective it waits at: all threads of a warp or block must wait at the same one
    RaceFiber race;
    std::vector<Stores> stores;                  // to shared memory, since the last collective
    Slot own, published;                         // its operands there; published: as its peers see them
    bool any = false;                            // the block's vote
    std::vector<std::vector<Copy>> copies;       // groups of copies under way; the last one is still open
    std::function<bool()> ready;                 // kPolling: whether it may go on
    std::vector<std::vector<Product>> products;  // as copies: groups of products (cuda_emulator_sm90.h)
  };

  ATTNPACK_UNSEEN static EmulatedBlock*& current() { return current_; }

  EmulatedBlock(int threads, uint64_t seed) : random_(seed), fibers_(threads) {
    for (auto& fiber : fibers_) fiber.stack.reset(new char[kStack]);
  }

  void run(const std::function<void()>& body) {
    current() = this;
    body_ = &body;
    races_.begin();
    for (auto& fiber : fibers_) {
      fiber.context.begin_with(&EmulatedBlock::enter, fiber.stack.get(), kStack);
      fiber.state = kRunnable;
      fiber.copies.assign(1, {});
      fiber.products.assign(1, {});
      fiber.stores.clear();
      fiber.race.make();
    }
    barriers_ = {};
    while (run_some()) {
    }
    if (barriers_.boxes()) fail("a block ends with boxes under way: they land in what comes after");
    for (auto& fiber : fibers_) fiber.race.destroy();
    races_.end();
    current() = nullptr;
  }

  ATTNPACK_UNSEEN int id() const { return active_; }
  ATTNPACK_UNSEEN Fiber& me() { return first_[active_]; }
  ATTNPACK_UNSEEN const Slot& peer(int lane) const { return first_[active_ / 32 * 32 + lane].published; }

  // Waits for the warp or the block. `orders`: what the threads did before it happens before what they do after it.
  void wait_for_others(State where, const Site& at, bool orders) {
    const Unseen unseen;
    me().state = where;
    me().at = &at;
    const size_t cell = where == kAtBlock ? fibers_.size() / kLanes : active_ / kLanes;
    if (orders) me().race.release(races_, cell, where == kAtBlock);
    leave();
    if (orders) me().race.acquire(races_, cell, where == kAtBlock);
  }
  // Barriers that count arrivals and bytes (cuda_emulator_sm90.h), and barriers by number.
  int32_t add_barrier(int arrivals) {
    const Unseen unseen;
    return barriers_.add(arrivals);
  }
  size_t cell_of(int32_t barrier) const { return kBarrierCells + barrier; }
  char* race_cell(int32_t barrier) { return races_.cell(cell_of(barrier)); }
  char* race_boxes(int32_t barrier) { return races_.boxes(cell_of(barrier)); }
  char* asynchronous_view() { return races_.asynchronous_view(); }
  void arrive(int32_t number, int64_t bytes) {
    me().race.release_cell(races_, cell_of(number));
    const Unseen unseen;
    barriers_.arrive(number, bytes);
  }
  void wait_for_phase(int32_t number, int parity, bool orders) {
    poll([this, number, parity] { return (barriers_.phase(number) & 1) != (parity & 1); });
    if (orders) me().race.wait_for_boxes(races_, cell_of(number));
  }
  // A product may not read where a box is under way, nor anybody the sums of a product that is.
  void check_landed(const char* from, int bytes) {
    if (barriers_.is_under_way(from, bytes)) fail("a product reads before its operand is there");
  }
  void check_finished(const void* sums) {
    for (const auto& group : me().products)
      for (const Product& product : group)
        if (product.sums == sums) fail("sums are held before their product is waited for");
  }
  void add_box(char* to, std::vector<char> box, int32_t barrier) {
    const Unseen unseen;
    barriers_.add_box(to, std::move(box), barrier);
  }
  void arrive_threads(int number, int threads, bool orders = true) {
    if (orders) me().race.release_cell(races_, kNumberCells + number);
    const Unseen unseen;
    if (!barriers_.arrive_at_number(number, threads)) fail("threads name different counts at a barrier");
  }
  void sync_threads(int number, int threads, bool orders) {
    const int phase = [&] {
      const Unseen unseen;
      return barriers_.phase_of_number(number);
    }();
    arrive_threads(number, threads, orders);
    poll([this, number, phase] { return barriers_.phase_of_number(number) != phase; });
    if (orders) me().race.acquire_cell(races_, kNumberCells + number);
  }

  template <class T>
  void bring(const T& x) {
    static_assert(sizeof(T) <= sizeof(Slot));
    const Unseen unseen;
    std::memcpy(me().own.bytes, &x, sizeof x);
  }
  template <class T>
  T brought_by(int lane) const {
    const Unseen unseen;
    T x;
    std::memcpy(&x, peer(lane).bytes, sizeof x);
    return x;
  }
  // Either NaN, which also shows where it is multiplied with 0, or large numbers, for which the kernels do not try once
  // more.
  void fill_garbage(void* at, size_t bytes) {
    const int byte = [&] {
      const Unseen unseen;
      return random_() % 2 ? 0xff : 0x48;
    }();
    std::memset(at, byte, bytes);
  }

  // The largest number of lanes whose stores of one instruction met in a bank, and of rows of one matrix.
  int most_conflicts() const { return most_conflicts_; }
  // Counts how many of these addresses of `bytes` each have the worst bank in common. Banks have 4 bytes.
  void count_conflicts(const uintptr_t* to, int lanes, int bytes) {
    const Unseen unseen;
    int worst[32] = {};
    for (int i = 0; i < lanes; ++i)
      if (std::find(to, to + i, to[i]) == to + i)
        for (int word = 0; word < bytes / 4; ++word) ++worst[(to[i] / 4 + word) % 32];
    most_conflicts_ = std::max(most_conflicts_, *std::max_element(worst, worst + 32));
  }

  [[noreturn]] void fail(const char* why) {
    std::fprintf(stderr, "emulated block: %s\n", why);
    std::abort();
  }

 private:
  static constexpr size_t kStack = kFiberStack, kLanes = 32;

  static constexpr size_t kNumberCells = 70, kBarrierCells = 90;

  // Lets others run until `ready` holds.
  void poll(std::function<bool()> ready) {
    const Unseen unseen;
    me().state = kPolling;
    me().ready = std::move(ready);
    leave();
  }
  void finish() {
    const Unseen unseen;
    for (const auto& group : me().products)
      if (!group.empty()) fail("a thread ends with products under way");
    for (const auto& group : me().copies)
      if (!group.empty()) fail("a thread ends with copies under way: they land in what comes after");
    me().state = kDone;
  }
  // The frames of a thread that ends are left as they are: to return from them would be seen by the wrong fiber.
  static void enter() {
    EmulatedBlock& block = *current();
    (*block.body_)();
    block.finish();
    block.races_.end_fiber();
    block.leave();
  }
  ATTNPACK_UNSEEN void leave() {
    Context& own = me().context;
    races_.enter_scheduler();
    Context::go(own, scheduler_);
  }

  // Runs a warp as far as its next collective, or all warps past a barrier. Warps have no common pace. Between two
  // barriers, either each warp goes all the way before the next one moves, in drawn order, or they take turns of drawn
  // lengths. So the first warp is a whole stretch ahead of the last one. If a barrier is missing, the first warp can
  // spoil what the others have yet to read, or read what they have yet to write.
  bool run_some() {
    const Unseen unseen;
    if (barriers_.boxes() && random_() % 4 == 0) barriers_.land(random_() % barriers_.boxes());
    for (auto& fiber : fibers_)
      if (fiber.state == kPolling && fiber.ready()) fiber.state = kRunnable;
    const auto can_move = [&](size_t w) {
      for (size_t i = w; i < w + kLanes; ++i)
        if (fibers_[i].state == kRunnable) return true;
      return false;
    };
    std::vector<size_t> warps;
    for (size_t w = 0; w < fibers_.size(); w += kLanes)
      if (can_move(w)) warps.push_back(w);
    if (warps.empty()) {
      if (barriers_.boxes()) {
        barriers_.land(random_() % barriers_.boxes());
        return true;
      }
      if (release(0, fibers_.size(), kAtBlock)) {
        turns_ = random_() % 2;
        return true;
      }
      for (auto& fiber : fibers_)
        if (fiber.state != kDone) fail("some threads wait for others that never come");
      return false;
    }
    if (!can_move(warp_) || (turns_ && random_() % 8 == 0)) warp_ = warps[random_() % warps.size()];
    std::iota(order_.begin(), order_.end(), static_cast<int>(warp_));
    std::shuffle(order_.begin(), order_.end(), random_);
    for (int i : order_) {
      if (fibers_[i].state != kRunnable) continue;
      active_ = i;
      fibers_[i].race.enter();
      Context::go(scheduler_, fibers_[i].context);
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
    for (size_t i = first; i < first + count; i += kLanes) check_stores(i);
    for (size_t i = first; i < first + count; ++i) {
      auto& fiber = fibers_[i];
      if (fiber.at->line() != fibers_[first].at->line() || fiber.at->column() != fibers_[first].at->column())
        fail("threads wait at different operations");
      fiber.published = fiber.own;
      fiber.any = any;
      fiber.state = kRunnable;
    }
    return true;
  }

  // The n-th stores of a warp's lanes are one instruction. Lanes go through the banks together: as many as 128 bytes.
  void check_stores(size_t first) {
    size_t count = fibers_[first].stores.size();
    for (size_t i = first; i < first + kLanes; ++i) count = std::min(count, fibers_[i].stores.size());
    for (size_t n = 0; n < count; ++n) {
      const int bytes = fibers_[first].stores[n].bytes, together = 128 / bytes;
      for (size_t begin = first; begin < first + kLanes; begin += together) {
        uintptr_t to[kLanes];
        for (int i = 0; i < together; ++i) to[i] = fibers_[begin + i].stores[n].to;
        count_conflicts(to, together, bytes);
      }
    }
    for (size_t i = first; i < first + kLanes; ++i) fibers_[i].stores.clear();
  }

  std::mt19937_64 random_;
  Races races_;
  int most_conflicts_ = 1;
  bool turns_ = false;
  size_t warp_ = 0;  // the first thread of the warp that moves
  std::vector<Fiber> fibers_;
  EmulatedBarriers barriers_;
  Fiber* const first_ = fibers_.data();
  static inline EmulatedBlock* current_ = nullptr;
  std::array<int, kLanes> order_;
  Context scheduler_;
  const std::function<void()>* body_ = nullptr;
  int active_ = 0;
};

inline EmulatedBlock& emulated() { return *EmulatedBlock::current(); }

// Sites that were reached, and the one that is left out: the threads go on in the same turns, but nothing that came
// before it is ordered before what comes after it. Else a thread that does not wait may be so far ahead that other
// barriers order its accesses.
struct Sites {
  std::set<std::string> reached;
  std::string left_out;
  static Sites& all();
  ATTNPACK_UNSEEN bool leaves_out(const Site& at) {
    if (!records) return false;
    const Unseen unseen;
    const std::string name = name_of(at);
    reached.insert(name);
    return name == left_out;
  }
  bool records = false;
};
inline Sites all_sites;
inline Sites& Sites::all() { return all_sites; }

inline int thread_id() { return emulated().id(); }
inline bool any_in_block(bool x, Site at = Site::current()) {
  if (Sites::all().leaves_out(at)) return x;  // each thread's own answer, and no barrier
  emulated().bring(x);
  emulated().wait_for_others(EmulatedBlock::kAtBlock, at, true);
  const Unseen unseen;
  return emulated().me().any;
}
inline void sync_block(Site at = Site::current()) {
  emulated().bring(false);
  emulated().wait_for_others(EmulatedBlock::kAtBlock, at, !Sites::all().leaves_out(at));
}
inline void sync_warp(Site at = Site::current()) {
  emulated().wait_for_others(EmulatedBlock::kAtWarp, at, !Sites::all().leaves_out(at));
}
template <class T>
T shuffle_xor(T x, int mask, Site at = Site::current()) {
  emulated().bring(x);
  emulated().wait_for_others(EmulatedBlock::kAtWarp, at, false);
  return emulated().brought_by<T>((thread_id() % 32) ^ mask);
}
inline uint32_t ballot(bool x, Site at = Site::current()) {
  emulated().bring(x);
  emulated().wait_for_others(EmulatedBlock::kAtWarp, at, false);
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<uint32_t>(emulated().brought_by<bool>(lane)) << lane;
  return votes;
}

inline int count_bits(uint32_t x) { return __builtin_popcount(x); }

inline void check_aligned(const void* at, int bytes) {
  if (reinterpret_cast<uintptr_t>(at) % bytes) emulated().fail("an address is no multiple of its access's size");
}
inline void copy_async(void* shared, const void* global, int bytes) {
  check_aligned(shared, 16);
  if (bytes) check_aligned(global, 16);
  emulated().me().race.start_copy(shared, global, bytes);
  const Unseen unseen;
  emulated().fill_garbage(shared, 16);
  emulated().me().copies.back().push_back({shared, global, bytes});
}
inline void copy_async_commit() {
  const Unseen unseen;
  emulated().me().race.close_group();
  emulated().me().copies.emplace_back();
}
template <int Pending>
void copy_async_wait(Site at = Site::current()) {
  if (Sites::all().leaves_out(at)) return;
  const Unseen unseen;
  auto& groups = emulated().me().copies;
  while (groups.size() > Pending + 1) {
    emulated().me().race.land_group();
    for (const auto& copy : groups.front()) {
      unsigned char bytes[16] = {};
      std::memcpy(bytes, copy.from, copy.bytes);
      std::memcpy(copy.to, bytes, 16);
    }
    groups.erase(groups.begin());
  }
}
inline void note_store(const void* to, int bytes) {
  const Unseen unseen;
  emulated().me().stores.push_back({reinterpret_cast<uintptr_t>(to), bytes});
}
inline void store_pair(float* to, float first, float second) {
  check_aligned(to, 8);
  note_store(to, 8);
  to[0] = first;
  to[1] = second;
}
inline void store_chunk(void* to, const uint32_t (&x)[4]) {
  check_aligned(to, 16);
  note_store(to, 16);
  std::memcpy(to, x, 16);
}

// The rows of each matrix that a load names are read at once.
inline void check_rows(const void* row) {
  check_aligned(row, 16);
  const Unseen unseen;
  if (thread_id() % 8) return;
  uintptr_t rows[8];
  for (int i = 0; i < 8; ++i)
    rows[i] = reinterpret_cast<uintptr_t>(emulated().brought_by<const void*>(thread_id() % 32 + i));
  emulated().count_conflicts(rows, 8, 16);
}

inline uint32_t emulated_pair(const uint16_t* low, const uint16_t* high) {
  return static_cast<uint32_t>(*low) | static_cast<uint32_t>(*high) << 16;
}
inline void load_matrices(uint32_t (&to)[4], const void* row, Site at = Site::current()) {
  emulated().bring(row);
  emulated().wait_for_others(EmulatedBlock::kAtWarp, at, false);
  check_rows(row);
  const int lane = thread_id() % 32;
  for (int m = 0; m < 4; ++m) {
    const auto* from =
        static_cast<const uint16_t*>(emulated().brought_by<const void*>(8 * m + lane / 4)) + lane % 4 * 2;
    to[m] = emulated_pair(from, from + 1);
  }
}
inline void load_matrices_transposed(uint32_t (&to)[4], const void* row, Site at = Site::current()) {
  emulated().bring(row);
  emulated().wait_for_others(EmulatedBlock::kAtWarp, at, false);
  check_rows(row);
  const int lane = thread_id() % 32;
  for (int m = 0; m < 4; ++m) {
    const auto number = [&](int r) {
      return static_cast<const uint16_t*>(emulated().brought_by<const void*>(8 * m + r)) + lane / 4;
    };
    to[m] = emulated_pair(number(lane % 4 * 2), number(lane % 4 * 2 + 1));
  }
}

struct EmulatedOperands {
  uint32_t a[4], b[2];
};
// Products of a lane: numbers 0 to 3 of its fragment C are of its two rows of A and its two columns of B.
struct EmulatedFactors {
  float rows[2][16], columns[2][16];
  void add_to(float (&c)[4]) const {
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k) c[i] += rows[i / 2][k] * columns[i % 2][k];
  }
};
template <class S>
float emulated_half(uint32_t reg, int half) {
  return widened(S{static_cast<uint16_t>(reg >> 16 * half)});
}
// The fragments as the PTX ISA draws them for mma.m16n8k16, written without the maps of index.h.
template <class S>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site at = Site::current()) {
  emulated().bring(EmulatedOperands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  emulated().wait_for_others(EmulatedBlock::kAtWarp, at, false);
  const int group = thread_id() % 32 / 4, in_group = thread_id() % 4;
  EmulatedFactors factors;
  for (int k = 0; k < 16; ++k) {
    const auto left = emulated().brought_by<EmulatedOperands>(group * 4 + k % 8 / 2);
    for (int h = 0; h < 2; ++h) {
      const auto right = emulated().brought_by<EmulatedOperands>((in_group * 2 + h) * 4 + k % 8 / 2);
      factors.rows[h][k] = emulated_half<S>(left.a[h + 2 * (k >= 8)], k % 2);
      factors.columns[h][k] = emulated_half<S>(right.b[k >= 8], k % 2);
    }
  }
  factors.add_to(c);
}

inline float power_of_two(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1 / x; }

// Every block finds garbage in its shared memory. Returns the most bank conflicts of any instruction; 1: none.
template <class Shared, class Body>
int run_blocks(int64_t blocks, int threads, uint64_t seed, const Body& body) {
  EmulatedBlock block(threads, seed);
  Guarded shared((sizeof(Shared) + 15) / 16 * 16);
  for (int64_t i = 0; i < blocks; ++i) {
    block.fill_garbage(shared.data(), shared.bytes());
    block.run([&] { body(i, shared.data()); });
  }
  return block.most_conflicts();
}

}  // namespace attnpack::cuda
