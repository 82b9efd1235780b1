#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace attnpack {

// Which pages of a pool the sequences of a paged cache hold. Several tables may stand on one pool; they share its
// reference counts. A page that several rows hold is read by all, and written by none: a row that is to write to it
// gets a page of its own first (copy on write, as in PagedAttention, Kwon et al. 2023). All numbers are on the CPU.
struct PageTable {
  at::Tensor block_table;  // [B, max_pages] int32: the pages of each sequence in order, then -1
  at::Tensor references;   // [num_pages] int32: how many rows of all tables hold each page; 0: it is free
  int64_t page_size;
};

// Rows [0, rows) of page `from` are to be copied into page `to` before anything is written there.
struct PageCopy {
  int64_t from, to, rows;
};

// A table that holds no page. Its pages, and those of the tables below, go back to the pool when the last tensor over
// its block_table ends.
PageTable make_page_table(int64_t batch, int64_t num_pages, int64_t page_size);

int64_t free_pages(const PageTable& table);

// Gives sequence b, which holds lengths[b] positions, room for counts[b] more. Where the last page is shared and is to
// be written, the sequence gets a copy of it. New pages follow the last one if they are free, because pages in order
// are read as one. Returns the copies that are to be made. Raises where too few pages are free or a row of block_table
// is too short; the table stays as it was then.
std::vector<PageCopy> give_room(const PageTable& table, const std::vector<int64_t>& lengths,
                                const std::vector<int64_t>& counts);

// Whether give_room would copy a page: a sequence is to write to its last page, and another row holds it too.
bool writes_shared_page(const PageTable& table, const std::vector<int64_t>& lengths,
                        const std::vector<int64_t>& counts);

// give_room in a copy of the table. `table` stays as it is, and holds its pages until it ends.
std::pair<PageTable, std::vector<PageCopy>> copy_with_room(const PageTable& table, const std::vector<int64_t>& lengths,
                                                           const std::vector<int64_t>& counts);

// Keeps the pages of the first lengths[b] positions of each sequence, and gives the others back.
void keep_pages(const PageTable& table, const std::vector<int64_t>& lengths);

// A table on the same pool whose row b holds the pages of row index[b]. It copies no page.
PageTable fork_pages(const PageTable& table, const at::Tensor& index);  // index [B'] int64

// A table like this one on a pool of its own, where nobody else holds pages.
PageTable clone_table(const PageTable& table);

// How many rows of pages hold positions. A row that several sequences share counts once.
int64_t used_rows(const PageTable& table, const std::vector<int64_t>& lengths);

// Makes the copies in a pool of any strides.
void copy_pages(const at::Tensor& pool,  // [num_pages, page_size, Hkv, D], written
                const std::vector<PageCopy>& copies);

}  // namespace attnpack
