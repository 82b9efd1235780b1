#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace attnpack {

// Writes new keys and values into pools of pages, after the positions that each sequence holds, and adds to lengths.
// Position j of sequence b is row j % page_size of page block_table[b, j / page_size]. Pools have any strides. Checks
// everything before the first write. Values are stored detached. Errors: c10::Error that names the argument; a call
// that fails has written nothing.
void kv_cache_append_paged_(const at::Tensor& key_pool,     // [num_pages, page_size, Hkv, D], written
                            const at::Tensor& value_pool,   // [num_pages, page_size, Hkv, Dv], written
                            const at::Tensor& block_table,  // [B, max_pages] int32
                            const at::Tensor& lengths,      // [B] int64, written
                            const at::Tensor& key,          // [B, Hkv, L, D], or packed [T, Hkv, D] with cu_seqlens
                            const at::Tensor& value,        // [B, Hkv, L, Dv], or [T, Hkv, Dv]
                            // how many of the L new positions of each sequence are valid, [B] int32 or int64; default:
                            // all
                            const std::optional<at::Tensor>& new_lens = std::nullopt,
                            // where the new rows of each sequence begin and the last one ends, [B + 1] int32 or int64
                            const std::optional<at::Tensor>& cu_seqlens = std::nullopt);

// A copy of keys or values from their pages, with zeros after the end of each sequence.
at::Tensor gather_pages(const at::Tensor& pool,         // [num_pages, page_size, Hkv, D]
                        const at::Tensor& block_table,  // [B, max_pages] int32, -1 where there is no page
                        const at::Tensor& lengths,      // [B] int64
                        const c10::SymInt& capacity);   // -> [B, Hkv, capacity, D], at least the longest sequence

// The checks of all backends but for the numbers in block_table and the lengths.
void check_kv_cache_append_paged(const at::Tensor& key_pool, const at::Tensor& value_pool,
                                 const at::Tensor& block_table, const at::Tensor& lengths, const at::Tensor& key,
                                 const at::Tensor& value, const std::optional<at::Tensor>& new_lens,
                                 const std::optional<at::Tensor>& cu_seqlens);

// New rows that follow each other in one page.
struct PageRun {
  int64_t sequence, first;  // the first new row, of the sequence in [B, Hkv, L, D], of all in [T, Hkv, D]
  int64_t page, row, count;
};
// The places that an append writes: the runs, and how many rows each sequence gets.
struct PagedPlaces {
  std::vector<PageRun> runs;
  std::vector<int64_t> counts;
};
// Checks the arguments, the numbers in them and their memory. Reading the numbers waits for a device.
PagedPlaces find_paged_places(const at::Tensor& key_pool, const at::Tensor& value_pool, const at::Tensor& block_table,
                              const at::Tensor& lengths, const at::Tensor& key, const at::Tensor& value,
                              const std::optional<at::Tensor>& new_lens, const std::optional<at::Tensor>& cu_seqlens);
// The rows of a run, [count, Hkv, D]: in a pool, and in the new keys or values.
at::Tensor rows_in_pool(const at::Tensor& pool, const PageRun& run);
at::Tensor new_rows(const at::Tensor& x, const PageRun& run);

}  // namespace attnpack
