#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/read_numbers.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/kv_cache_paged.h>

namespace attnpack {

using at::Tensor;

namespace {

void check_pool(const char* name, const Tensor& pool, const Tensor& x, bool packed) {
  ATTNPACK_CHECK(pool.dim() == 4 && pool.sym_size(1) >= 1, name, "_pool has shape ", pool.sym_sizes(),
                 ", wants [num_pages, page_size, num_kv_heads, head_dim] with pages of at least 1 row");
  ATTNPACK_CHECK(x.dim() == (packed ? 3 : 4), name, " has shape ", x.sym_sizes(), ", wants ",
                 packed ? "[tokens, num_kv_heads, head_dim] with cu_seqlens"
                        : "[batch, num_kv_heads, length, head_dim]: pass cu_seqlens for packed rows");
  ATTNPACK_CHECK(x.sym_size(1) == pool.sym_size(2) && x.sym_size(-1) == pool.sym_size(3), name, " has shape ",
                 x.sym_sizes(), ", its pool ", pool.sym_sizes(), ": heads and head_dim must agree");
  ATTNPACK_CHECK(x.scalar_type() == pool.scalar_type(), name, " has dtype ", x.scalar_type(), ", its pool ",
                 pool.scalar_type(), ": make the pools in the model's dtype");
  ATTNPACK_CHECK(x.device() == pool.device(), name, " is on ", x.device(), ", its pool on ", pool.device(),
                 ": make the pools on the model's device");
}

// Raises if two runs write the same row of a page.
void check_rows_differ(std::vector<PageRun> runs) {
  std::sort(runs.begin(), runs.end(),
            [](const PageRun& a, const PageRun& b) { return a.page != b.page ? a.page < b.page : a.row < b.row; });
  for (size_t i = 1; i < runs.size(); ++i) {
    const PageRun &a = runs[i - 1], &b = runs[i];
    ATTNPACK_CHECK(a.page != b.page || a.row + a.count <= b.row, "block_table gives row ", b.row, " of page ", b.page,
                   " to the new rows of sequences ", a.sequence, " and ", b.sequence,
                   ": sequences may share the pages that they hold, but each writes to pages of its own");
  }
}

}  // namespace

void check_kv_cache_append_paged(const Tensor& key_pool, const Tensor& value_pool, const Tensor& block_table,
                                 const Tensor& lengths, const Tensor& key, const Tensor& value,
                                 const std::optional<Tensor>& new_lens, const std::optional<Tensor>& cu_seqlens) {
  check_pool("key", key_pool, key, cu_seqlens.has_value());
  check_pool("value", value_pool, value, cu_seqlens.has_value());
  ATTNPACK_CHECK(key_pool.sym_size(0) == value_pool.sym_size(0) && key_pool.sym_size(1) == value_pool.sym_size(1),
                 "key_pool has shape ", key_pool.sym_sizes(), ", value_pool ", value_pool.sym_sizes(),
                 ": pages and page_size must agree");
  const int64_t tokens = cu_seqlens ? 0 : 2;  // the dimension that counts them
  ATTNPACK_CHECK(key.sym_size(tokens) == value.sym_size(tokens) && key.sym_size(0) == value.sym_size(0),
                 "key has shape ", key.sym_sizes(), ", value ", value.sym_sizes(), ": their rows must agree");
  ATTNPACK_CHECK(block_table.dim() == 2 && block_table.scalar_type() == at::kInt, "block_table has shape ",
                 block_table.sym_sizes(), " and dtype ", block_table.scalar_type(), ", wants int32 [batch, max_pages]");
  const c10::SymInt batch = block_table.sym_size(0);
  ATTNPACK_CHECK(lengths.dim() == 1 && lengths.sym_size(0) == batch && lengths.scalar_type() == at::kLong,
                 "lengths have shape ", lengths.sym_sizes(), " and dtype ", lengths.scalar_type(),
                 ", wants int64 [batch] = [", batch, "]: one number for each row of block_table");
  if (cu_seqlens) {
    ATTNPACK_CHECK(!new_lens, "new_lens is given with cu_seqlens, wants none: cu_seqlens says how many rows are new");
    ATTNPACK_CHECK(cu_seqlens->dim() == 1 && cu_seqlens->sym_size(0) == batch + 1 && is_int32_or_int64(*cu_seqlens),
                   "cu_seqlens has shape ", cu_seqlens->sym_sizes(), " and dtype ", cu_seqlens->scalar_type(),
                   ", wants int32 or int64 [batch + 1] = [", batch + 1, "]");
  } else {
    ATTNPACK_CHECK(key.sym_size(0) == batch, "key has batch ", key.sym_size(0), ", block_table ", batch,
                   " rows: they must agree");
    if (new_lens) check_new_lens(*new_lens, batch, "new_lens");
  }
}

PagedPlaces find_paged_places(const Tensor& key_pool, const Tensor& value_pool, const Tensor& block_table,
                              const Tensor& lengths, const Tensor& key, const Tensor& value,
                              const std::optional<Tensor>& new_lens, const std::optional<Tensor>& cu_seqlens) {
  check_kv_cache_append_paged(key_pool, value_pool, block_table, lengths, key, value, new_lens, cu_seqlens);
  check_kv_cache_memory(key_pool, value_pool, lengths, key, value);
  const int64_t num_pages = key_pool.size(0), page_size = key_pool.size(1), most = block_table.size(1) * page_size;
  const std::vector<int64_t> past = read_numbers(lengths);
  const std::vector<int64_t> numbers = cu_seqlens ? read_numbers(*cu_seqlens)
                                       : new_lens ? read_numbers(*new_lens)
                                                  : std::vector<int64_t>(past.size(), key.size(2));
  const Tensor table = block_table.cpu();
  PagedPlaces places;
  if (cu_seqlens)
    ATTNPACK_CHECK(numbers.front() == 0 && numbers.back() == key.size(0), "cu_seqlens goes from ", numbers.front(),
                   " to ", numbers.back(), ", wants 0 to ", key.size(0), ", the rows of key");
  for (size_t b = 0; b < past.size(); ++b) {
    const int64_t count = cu_seqlens ? numbers[b + 1] - numbers[b] : numbers[b];
    ATTNPACK_CHECK(!cu_seqlens || count >= 0, "cu_seqlens[", b + 1, "] is ", numbers[b] + count, " after ", numbers[b],
                   ", wants numbers that never fall");
    if (!cu_seqlens) check_new_len(static_cast<int64_t>(b), count, key.size(2), "new_lens");
    ATTNPACK_CHECK(past[b] >= 0 && past[b] <= most, "lengths[", b, "] is ", past[b], ", wants 0 to ", most,
                   ", the positions that a row of block_table holds");
    ATTNPACK_CHECK(count <= most - past[b], "block_table is full: sequence ", b, " holds ", past[b], " of ", most,
                   " positions and ", count, " are to be appended: give it more pages");
    places.counts.push_back(count);
    for (int64_t done = 0, some; done < count; done += some) {
      const int64_t position = past[b] + done, entry = position / page_size, row = position % page_size;
      const int64_t page = table.const_data_ptr<int32_t>()[b * table.stride(0) + entry * table.stride(1)];
      ATTNPACK_CHECK(page >= 0 && page < num_pages, "block_table[", b, ", ", entry, "] is ", page,
                     ", wants a page from 0 to ", num_pages - 1, ": position ", position, " is to be written there");
      some = std::min(page_size - row, count - done);
      places.runs.push_back({static_cast<int64_t>(b), (cu_seqlens ? numbers[b] : 0) + done, page, row, some});
    }
  }
  check_rows_differ(places.runs);
  return places;
}

Tensor rows_in_pool(const Tensor& pool, const PageRun& run) {
  return pool.select(0, run.page).narrow(0, run.row, run.count);
}

Tensor new_rows(const Tensor& x, const PageRun& run) {
  const Tensor sequence_rows = x.dim() == 4 ? x.select(0, run.sequence).transpose(0, 1) : x;
  return sequence_rows.narrow(0, run.first, run.count);
}

Tensor gather_pages(const Tensor& pool, const Tensor& block_table, const Tensor& lengths, const c10::SymInt& capacity) {
  check_defined("pool", pool);
  check_defined("block_table", block_table);
  check_defined("lengths", lengths);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const c10::SymInt size = pool.sym_size(1), most = block_table.sym_size(1), wanted = (capacity + size - 1) / size;
  const Tensor pages = block_table.narrow_symint(1, 0, wanted < most ? wanted : most).to(pool.device());
  Tensor rows = pool.index_select(0, pages.clamp_min(0).flatten()).unflatten_symint(0, pages.sym_sizes()).flatten(1, 2);
  rows = at::constant_pad_nd_symint(rows, {0, 0, 0, 0, 0, capacity - rows.sym_size(1)});  // it may cut, too
  const Tensor valid = at::arange(capacity, lengths.options()) < lengths.unsqueeze(1);    // [B, capacity]
  return at::where(valid.unsqueeze(-1).unsqueeze(-1), rows, at::zeros({}, rows.options())).transpose(1, 2).contiguous();
}

void kv_cache_append_paged_(const Tensor& key_pool, const Tensor& value_pool, const Tensor& block_table,
                            const Tensor& lengths, const Tensor& key, const Tensor& value,
                            const std::optional<Tensor>& new_lens, const std::optional<Tensor>& cu_seqlens) {
  static const DispatchedOp<decltype(kv_cache_append_paged_)> op("attnpack::kv_cache_append_paged_");
  op(key_pool, value_pool, block_table, lengths, key, value, new_lens, cu_seqlens);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def(
      "kv_cache_append_paged_(Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor block_table, Tensor(c!) lengths, "
      "Tensor key, Tensor value, Tensor? new_lens, Tensor? cu_seqlens) -> ()");
}
