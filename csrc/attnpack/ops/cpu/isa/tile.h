#pragma once

#include <attnpack/ops/cpu/isa/kernels.h>
#include <attnpack/ops/cpu/isa/matmul.h>
#include <attnpack/ops/cpu/isa/scores.h>

// Parts of both forward and backward: dispatch on the dtype, addresses, scratch, the rows of a tile.
namespace attnpack::ATTNPACK_ISA {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Calls f(storage, accumulation) with one value of each type. Kernels with pairs are compiled without fp64, which has
// no pairs: isa_table.h gives such calls to the kernels of plain AVX-512.
template <class F>
inline void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      if constexpr (!kPairProducts) return f(double{}, double{});
      __builtin_unreachable();
    case DType::kFloat32:
      return f(float{}, float{});
    case DType::kBFloat16:
      return f(BFloat16{}, float{});
    default:
      return f(Float16{}, float{});
  }
}
// Whether kernels for rows of these numbers are compiled: with pairs only those of bf16.
template <class S>
constexpr bool kCompiled = !kPairProducts || std::is_same_v<S, BFloat16>;
// For kernels that have only these.
template <class F>
inline void dispatch_pairs(DType dtype, F&& f) {
  if constexpr (kPairProducts)
    f(BFloat16{}, float{});
  else
    dispatch(dtype, f);
}

template <class S>
inline const S* at(const void* base, const Strides& s, int64_t b, int64_t head, int64_t row) {
  return static_cast<const S*>(base) + b * s.batch + head * s.head + row * s.row;
}
template <class S>
inline S* at(void* base, const Strides& s, int64_t b, int64_t head, int64_t row) {
  return static_cast<S*>(base) + b * s.batch + head * s.head + row * s.row;
}

// Hands out aligned pieces of a scratch buffer. With a null base it only counts the bytes.
class Arena {
 public:
  explicit Arena(void* base) : next_(reinterpret_cast<uintptr_t>(base)) {}
  template <class T>
  T* take(int64_t count) {
    const uintptr_t piece = next_;
    next_ += (static_cast<uintptr_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  size_t used() const { return next_; }

 private:
  uintptr_t next_;
};

// How many bytes the scratch of a call takes. A Scratch<S, A> lays its parts out in an arena.
template <template <class, class> class Scratch>
inline size_t scratch_bytes(const AttentionParams& p) {
  Arena arena(nullptr);
  dispatch(p.dtype,
           [&](auto storage, auto accumulation) { Scratch<decltype(storage), decltype(accumulation)>(p, arena); });
  return arena.used();
}

// Knows which blocks of a head's keys are packed in scratch. A head with at most kPackedKeys keys has a slot for each
// block, and all blocks stay packed for its next tile. Otherwise there is one slot, which is packed anew each time.
class PackedBlocks {
 public:
  PackedBlocks(int64_t kv_len, int64_t block, Arena& arena) : block_(block) {
    const int64_t all = larger((kv_len + block - 1) / block, 1);
    stay_ = all * block <= kPackedKeys;
    slots_ = stay_ ? all : 1;
    head_ = arena.take<int64_t>(1);  // at the start of scratch, which the owner has zeroed
    packed_ = arena.take<char>(slots_);
  }
  int64_t slots() const { return slots_; }
  // Begins a tile; head = b * num_kv_heads + kv_head.
  void begin_tile(int64_t head) {
    if (*head_ == head + 1) return;
    *head_ = head + 1;
    for (int64_t i = 0; i < slots_; ++i) packed_[i] = 0;
  }
  // The slot of the block that begins at key `begin`. Calls pack(slot) if the block is not packed yet.
  template <class F>
  int64_t slot(int64_t begin, F&& pack) {
    const int64_t slot = stay_ ? begin / block_ : 0;
    if (!stay_ || !packed_[slot]) pack(slot);
    packed_[slot] = 1;
    return slot;
  }

 private:
  int64_t block_, slots_;
  bool stay_;
  int64_t* head_;
  char* packed_;
};

// Rows [begin, end) of a kv head.
struct RowTile {
  QueryRow rows[kWholeHeadRows];
  int64_t count;
  Range keys;  // hull of the rows' ranges
};

// allowed: the keys that a shared mask leaves.
inline void make_rows(const AttentionParams& p, int64_t b, int64_t kv_head, Range range, Range allowed, RowTile& tile) {
  tile.count = range.end - range.begin;
  tile.keys = {p.kv_len, 0};
  if (range.empty()) return;
  // Counted, not divided: short heads have few products per row.
  const int64_t group = group_size(p, kv_head), first_head = group_head(p, kv_head, 0);
  int64_t query = range.begin / group, member = range.begin % group;
  for (int64_t r = 0; r < tile.count; ++r) {
    const int64_t head = p.group_start ? group_head(p, kv_head, member) : first_head + member;
    const QueryRow& row = tile.rows[r] = make_query_row(p, b, head, query, allowed);
    if (++member == group) member = 0, ++query;
    if (row.keys.empty()) continue;
    if (row.keys.begin < tile.keys.begin) tile.keys.begin = row.keys.begin;
    if (row.keys.end > tile.keys.end) tile.keys.end = row.keys.end;
  }
}

// Rows and keys that take part in the same product: whole register tiles.
constexpr int64_t kPart = 12;

// Cuts a tile into runs of rows that see about the same of the keys [begin, begin + most), and calls f(rows, keys) for
// each, with keys counted from begin: the rows see no others. So products on the diagonal, and those where windows
// begin, leave out most of what is excluded. The range of keys begins with a whole panel. It has at least one key,
// even for rows that see none of these.
template <class A, class F>
inline void for_each_part(const RowTile& tile, int64_t begin, int64_t most, F&& f) {
  const auto seen_from = [&](int64_t first) {
    Range keys{begin + most, begin};
    for (int64_t r = first; r < smaller(first + kPart, tile.count); ++r) {
      const Range& row = tile.rows[r].keys;
      if (!row.empty()) keys = {smaller(keys.begin, row.begin), larger(keys.end, row.end)};
    }
    const Range seen{larger(keys.begin - begin, 0), smaller(keys.end - begin, most)};
    return seen.empty() ? Range{0, 1} : Range{seen.begin / kPanel<A> * kPanel<A>, seen.end};
  };
  for (int64_t first = 0, end; first < tile.count; first = end) {
    const Range keys = seen_from(first);
    end = first + kPart;
    for (; end < tile.count; end += kPart) {
      const Range more = seen_from(end);
      if (more.begin != keys.begin || more.end != keys.end) break;
    }
    end = smaller(end, tile.count);
    f(Range{first, end}, keys);
  }
}

// Cuts the keys [begin, begin + count) into runs that about the same rows of a tile see, and calls f(keys, rows) for
// each, with keys counted from begin. No other rows see them. Runs that no row sees are left out.
template <class F>
inline void for_each_key_part(const RowTile& tile, int64_t begin, int64_t count, F&& f) {
  const auto rows_that_see = [&](Range keys) {
    Range rows{tile.count, 0};
    for (int64_t r = 0; r < tile.count; ++r)
      if (tile.rows[r].keys.begin < begin + keys.end && tile.rows[r].keys.end > begin + keys.begin)
        rows = {smaller(rows.begin, r), r + 1};
    return rows;
  };
  bool whole = true;
  for (int64_t r = 0; r < tile.count; ++r)
    whole &= tile.rows[r].keys.begin <= begin && tile.rows[r].keys.end >= begin + count;
  const int64_t step = whole ? count : 2 * kPart;
  Range keys{0, 0}, rows{0, 0};
  for (int64_t first = 0; first < count; first += step) {
    const Range more{first, smaller(first + step, count)}, seen = rows_that_see(more);
    if (seen.begin != rows.begin || seen.end != rows.end) {
      if (!rows.empty()) f(keys, rows);
      keys.begin = first, rows = seen;
    }
    keys.end = more.end;
  }
  if (!rows.empty()) f(keys, rows);
}

// Packs the tile's rows of a [B, H, L, columns] tensor as [count, ld].
template <class A, class S>
inline void pack_rows(const RowTile& tile, const void* base, const Strides& strides, int64_t b, int64_t columns, A* to,
                      int64_t ld) {
  for (int64_t r = 0; r < tile.count; ++r)
    pack(at<S>(base, strides, b, tile.rows[r].head, tile.rows[r].query), columns, to + r * ld, ld);
}

}  // namespace attnpack::ATTNPACK_ISA
