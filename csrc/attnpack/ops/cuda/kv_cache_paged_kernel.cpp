#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/kv_cache_paged.h>

// A composition: one copy for each run of rows in a page. It reads the numbers, so it waits for the device.
namespace attnpack {
namespace {

using at::Tensor;

void kv_cache_append_paged_cuda(const Tensor& key_pool, const Tensor& value_pool, const Tensor& block_table,
                                const Tensor& lengths, const Tensor& key, const Tensor& value,
                                const std::optional<Tensor>& new_lens, const std::optional<Tensor>& cu_seqlens) {
  const PagedPlaces places =
      find_paged_places(key_pool, value_pool, block_table, lengths, key, value, new_lens, cu_seqlens);
  for (const PageRun& run : places.runs) {
    rows_in_pool(key_pool, run).copy_(new_rows(key, run));
    rows_in_pool(value_pool, run).copy_(new_rows(value, run));
  }
  lengths.add_(at::tensor(places.counts, at::kLong).to(lengths.device()));
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) { m.impl("kv_cache_append_paged_", attnpack::kv_cache_append_paged_cuda); }
