#pragma once

#include "cuda_emulator.h"

// The operations of device_sm90.cuh on the emulated block. Products read their operands when they are waited for, and
// copies of boxes land when the scheduler draws them, or when nothing else can run. The layout of operands in shared
// memory is written from the PTX ISA, without the helpers of the kernels. Under ThreadSanitizer a product that reads a
// store without fence_stores is a race too. Not modelled: the number of registers.
namespace attnpack::cuda {

struct TileMap {
  const char* base;
  int64_t sizes[4], steps[3];  // columns, rows, heads, batch; steps in bytes
  int box_rows;
};

struct Barrier {
  int32_t number, arrivals;
};
inline void set_up(Barrier& barrier, int arrivals) { barrier = {emulated().add_barrier(arrivals), arrivals}; }
inline void publish_barriers() {}
inline void arrive(Barrier& barrier) { emulated().arrive(barrier.number, 0); }
inline void arrive_expecting(Barrier& barrier, int bytes) { emulated().arrive(barrier.number, bytes); }
inline void wait(Barrier& barrier, int parity, Site at = Site::current()) {
  emulated().wait_for_phase(barrier.number, parity, !Sites::all().leaves_out(at));
}

inline void copy_box(void* panel, const TileMap& map, Barrier& barrier, int column, int row, int head, int batch) {
  constexpr int kColumns = 64, kRowBytes = 128;
  if (reinterpret_cast<uintptr_t>(panel) % 1024) emulated().fail("a panel is not at a multiple of 1,024 bytes");
  if (head >= map.sizes[2] || batch >= map.sizes[3]) emulated().fail("a box of a head that is not there");
  auto* to = static_cast<char*>(panel);
  std::vector<char> box(map.box_rows * kRowBytes, 0);
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < kColumns; ++c) {
      if (row + r >= map.sizes[1] || column + c >= map.sizes[0]) continue;
      const char* from =
          map.base + batch * map.steps[2] + head * map.steps[1] + (row + r) * map.steps[0] + 2 * (column + c);
      const int place = r * kRowBytes + (2 * c ^ (r % 8) * 16);
      std::memcpy(box.data() + place, from, 2);
    }
  emulated().me().race.write_box(to, static_cast<int>(box.size()), emulated().race_cell(barrier.number),
                                 emulated().race_boxes(barrier.number));
  const Unseen unseen;
  emulated().fill_garbage(to, box.size());
  emulated().add_box(to, std::move(box), barrier.number);
}

inline void fence_stores(Site at = Site::current()) {
  if (!Sites::all().leaves_out(at)) emulated().me().race.fence_stores(emulated().asynchronous_view());
}
inline void sync_threads(int number, int threads, Site at = Site::current()) {
  emulated().sync_threads(number, threads, !Sites::all().leaves_out(at));
}
inline void arrive_threads(int number, int threads) { emulated().arrive_threads(number, threads); }
template <int Registers>
void release_registers() {}
template <int Registers>
void take_registers() {}

struct SharedMatrix {
  const char* tile;
  int offset, panel_bytes;
  SharedMatrix further(int bytes) const { return {tile, offset + bytes, panel_bytes}; }
  // Number `column` of row `row`, where the columns are contiguous.
  const uint16_t* at(int row, int column) const {
    const int place = offset + column / 64 * panel_bytes + row * 128 + column % 64 * 2;
    return reinterpret_cast<const uint16_t*>(tile + (place ^ (place >> 7 & 7) << 4));
  }
};
inline SharedMatrix shared_matrix(const void* tile, int panel_bytes) {
  if (reinterpret_cast<uintptr_t>(tile) % 1024) emulated().fail("an operand is not at a multiple of 1,024 bytes");
  return {static_cast<const char*>(tile), 0, panel_bytes};
}
inline void hold(SharedMatrix&) {}

inline void fence_products(Site at = Site::current()) { emulated().wait_for_others(EmulatedBlock::kAtWarp, at, false); }
inline void commit_products() {
  const Unseen unseen;
  emulated().me().race.close_products();
  emulated().me().products.emplace_back();
}
template <int Pending>
void wait_products(Site at = Site::current()) {
  if (Sites::all().leaves_out(at)) return;
  auto& groups = emulated().me().products;
  while (groups.size() > Pending + 1) {
    emulated().me().race.land_products();
    const Unseen unseen;
    for (const auto& product : groups.front()) product.run();
    groups.erase(groups.begin());
  }
}
template <int Blocks>
void hold(float (&c)[Blocks][4]) {
  const Unseen unseen;
  emulated().check_finished(&c);
}
template <int Blocks>
void hold(uint32_t (&)[Blocks][4]) {}

// Number i of a lane's fragment C: its row in the warpgroup's 64, its column in the block's 8.
inline int row_of_number(int thread, int i) { return thread % 128 / 32 * 16 + thread % 32 / 4 + (i >= 2) * 8; }
inline int column_of_number(int thread, int i) { return thread % 4 * 2 + (i & 1); }

// One warp of a warpgroup names what all of them read, each lane its rows: ThreadSanitizer keeps few readers of a
// place.
inline void note_reads(const SharedMatrix& m, int rows, int columns) {
  if (thread_id() / 32 % 4) return;
  for (int r = thread_id() % 32; r < rows; r += 32)
    for (int c = 0; c < columns; c += 8) {
      emulated().me().race.read_operand(m.at(r, c), 16, emulated().asynchronous_view());
      const Unseen unseen;
      emulated().check_landed(reinterpret_cast<const char*>(m.at(r, c)), 16);
    }
}

// c += A B when the product is waited for. left(h, k): number k of the lane's row h. right(k, column).
template <class S, int Blocks, class Left, class Right>
void add_product(float (&c)[Blocks][4], const Left& left, const Right& right) {
  const Unseen unseen;
  const int thread = thread_id();
  emulated().me().products.back().push_back({&c, [&c, left, right, thread] {
                                               EmulatedFactors factors;
                                               for (int h = 0; h < 2; ++h)
                                                 for (int k = 0; k < 16; ++k)
                                                   factors.rows[h][k] = widened(S{left(h, k)});
                                               for (int j = 0; j < Blocks; ++j) {
                                                 for (int h = 0; h < 2; ++h)
                                                   for (int k = 0; k < 16; ++k)
                                                     factors.columns[h][k] =
                                                         widened(S{right(k, 8 * j + column_of_number(thread, h))});
                                                 factors.add_to(c[j]);
                                               }
                                             }});
}
template <class S, int Blocks>
void multiply_rows(float (&c)[Blocks][4], SharedMatrix a, SharedMatrix b, bool add) {
  note_reads(a, 64, 16);
  note_reads(b, 8 * Blocks, 16);
  const int thread = thread_id();
  if (!add) {
    const Unseen unseen;
    emulated().me().products.back().push_back({&c, [&c] { std::memset(c, 0, sizeof c); }});
  }
  add_product<S>(
      c, [=](int h, int k) { return *a.at(row_of_number(thread, 2 * h), k); },
      [=](int k, int column) { return *b.at(column, k); });
}
template <class S, int Blocks>
void multiply_columns(float (&c)[Blocks][4], const uint32_t (&a)[4], SharedMatrix b, Site at = Site::current()) {
  note_reads(b, 16, 8 * Blocks);
  std::array<std::array<uint16_t, 16>, 2> rows;  // of this lane's two rows
  emulated().bring(EmulatedOperands{{a[0], a[1], a[2], a[3]}, {}});
  emulated().wait_for_others(EmulatedBlock::kAtWarp, at, false);
  const int thread = thread_id();
  for (int h = 0; h < 2; ++h)
    for (int k = 0; k < 16; ++k) {
      const auto peer = emulated().brought_by<EmulatedOperands>(thread % 32 / 4 * 4 + k % 8 / 2);
      rows[h][k] = static_cast<uint16_t>(peer.a[h + 2 * (k >= 8)] >> 16 * (k % 2));
    }
  add_product<S>(c, [rows](int h, int k) { return rows[h][k]; }, [b](int k, int column) { return *b.at(k, column); });
}
template <class S, int Blocks>
void multiply_shared_columns(float (&c)[Blocks][4], SharedMatrix a, SharedMatrix b) {
  note_reads(a, 64, 16);
  note_reads(b, 16, 8 * Blocks);
  const int thread = thread_id();
  add_product<S>(
      c, [a, thread](int h, int k) { return *a.at(row_of_number(thread, 2 * h), k); },
      [b](int k, int column) { return *b.at(k, column); });
}

}  // namespace attnpack::cuda
