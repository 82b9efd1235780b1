#pragma once

#include <type_traits>
#include <utility>

#include <attnpack/core/params.h>

// Where the rows of a matrix stand in memory. Kernels that stream or pack rows take any of these kinds: rows[j] points
// to row j, and rows.ahead(j) to what is prefetched as row j.
namespace attnpack::ATTNPACK_ISA {

// Rows that lie `stride` elements apart.
template <class S>
struct StridedRows {
  static constexpr bool kListed = false;
  const S* first;
  int64_t stride;
  int64_t most_ahead() const { return INT64_MAX; }  // rows after the last one that may be named, to prefetch them
  const S* operator[](int64_t j) const { return first + j * stride; }
  const S* ahead(int64_t j) const { return first + j * stride; }
  StridedRows from(int64_t j) const { return {first + j * stride, stride}; }
};

// Rows that are listed one by one, because they lie in pages or because several heads are read in turn. `list` holds
// the rows of the first head. `next` holds the rows to prefetch meanwhile. For pages it is `list`. For heads in turn it
// holds rows of all these heads, in the order of their addresses.
template <class S>
struct ListedRows {
  static constexpr bool kListed = true;
  static constexpr int64_t kMostAhead = 256;  // rows by which a list of pages goes on after its last one
  const S* const* list;
  int64_t of_head;  // from a row of the first head to that of this head
  const S* const* next;
  const S* operator[](int64_t j) const { return list[j] + of_head; }
  const S* ahead(int64_t j) const { return next[j]; }
  ListedRows from(int64_t j) const { return {list + j, of_head, next + j}; }
  int64_t most_ahead() const { return next == list ? kMostAhead : 0; }
};

template <class Rows>
using ElementOf = std::remove_cvref_t<decltype(*std::declval<Rows>()[0])>;

// How many of the rows from j to `end` lie `stride` elements apart.
template <class S>
inline int64_t run_length(const StridedRows<S>&, int64_t, int64_t j, int64_t end) {
  return end - j;
}
template <class S>
inline int64_t run_length(const ListedRows<S>& rows, int64_t stride, int64_t j, int64_t end) {
  int64_t count = 1;
  while (j + count < end && rows[j + count] == rows[j] + count * stride) ++count;
  return count;
}

// How many pointers a list of up to `count` rows takes. A call whose keys are not in pages needs no list.
template <class S>
inline int64_t list_length(const AttentionParams& p, int64_t count) {
  return p.block_table ? count + ListedRows<S>::kMostAhead : 0;
}

// The row of the pages, one after the other, that holds key j.
inline int64_t row_of_pages(const AttentionParams& p, int64_t j) { return p.selected.skipped + j; }

// Whether the rows of keys [begin, end), at least one, follow each other without gaps, and those of their values too.
inline bool rows_follow(const AttentionParams& p, int64_t begin, int64_t end) {
  const int64_t first = row_of_pages(p, begin) / p.page_size, last = row_of_pages(p, end - 1) / p.page_size;
  const auto follow = [&](const Strides& s, int64_t width) {
    return s.row == width && (first == last || s.batch == p.page_size * width);
  };
  if (!follow(p.key_strides, p.head_dim) || !follow(p.value_strides, p.v_head_dim)) return false;
  for (int64_t i = first; i < last; ++i)
    if (p.block_table[i + 1] != p.block_table[i] + 1) return false;
  return true;
}

// Row j of a kv head of a pool with these strides.
template <class S>
inline const S* row_in_page(const AttentionParams& p, const void* pool, const Strides& strides, int64_t kv_head,
                            int64_t j) {
  const int64_t row = row_of_pages(p, j);
  return static_cast<const S*>(pool) + p.block_table[row / p.page_size] * strides.batch + kv_head * strides.head +
         row % p.page_size * strides.row;
}

// Lists rows [begin, begin + count + ahead) of a kv head of a pool with these strides. After the last key of the
// sequence the table may hold anything, so the last key stands for the rows that would follow.
template <class S>
inline ListedRows<S> list_rows(const AttentionParams& p, const void* pool, const Strides& strides, int64_t kv_head,
                               int64_t begin, int64_t count, int64_t ahead, const S** list) {
  const S* const head = static_cast<const S*>(pool) + kv_head * strides.head;
  const int64_t listed = count + ahead, present = p.kv_len - begin < listed ? p.kv_len - begin : listed;
  const int32_t* page = p.block_table + row_of_pages(p, begin) / p.page_size;
  int64_t in_page = row_of_pages(p, begin) % p.page_size, j = 0;
  if (p.page_size == 1)
    for (; j < present; ++j) list[j] = head + page[j] * strides.batch;
  for (; j < present; in_page = 0) {
    const S* row = head + *page++ * strides.batch + in_page * strides.row;
    const int64_t left = p.page_size - in_page, end = j + (left < present - j ? left : present - j);
    for (; j < end; row += strides.row) list[j++] = row;
  }
  for (; j < listed; ++j) list[j] = list[present - 1];
  return {list, 0, list};
}

}  // namespace attnpack::ATTNPACK_ISA
