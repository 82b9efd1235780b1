#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstring>

#include <attnpack/ops/kv_cache_paged.h>

namespace attnpack {
namespace {

using at::Tensor;

// to <- from, both [count, heads, width].
void copy_rows(const Tensor& to, const Tensor& from) {
  if (to.stride(2) != 1 || from.stride(2) != 1) {
    to.copy_(from);
    return;
  }
  const int64_t size = to.element_size();
  char* target = static_cast<char*>(to.mutable_data_ptr());
  const char* source = static_cast<const char*>(from.const_data_ptr());
  for (int64_t l = 0; l < to.size(0); ++l)
    for (int64_t h = 0; h < to.size(1); ++h)
      std::memcpy(target + (l * to.stride(0) + h * to.stride(1)) * size,
                  source + (l * from.stride(0) + h * from.stride(1)) * size, to.size(2) * size);
}

void kv_cache_append_paged_cpu(const Tensor& key_pool, const Tensor& value_pool, const Tensor& block_table,
                               const Tensor& lengths, const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& new_lens, const std::optional<Tensor>& cu_seqlens) {
  const PagedPlaces places =
      find_paged_places(key_pool, value_pool, block_table, lengths, key, value, new_lens, cu_seqlens);
  const Tensor new_keys = key.detach(), new_values = value.detach();
  for (const PageRun& run : places.runs) {
    copy_rows(rows_in_pool(key_pool, run), new_rows(new_keys, run));
    copy_rows(rows_in_pool(value_pool, run), new_rows(new_values, run));
  }
  for (size_t b = 0; b < places.counts.size(); ++b)
    lengths.mutable_data_ptr<int64_t>()[static_cast<int64_t>(b) * lengths.stride(0)] += places.counts[b];
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CPU, m) { m.impl("kv_cache_append_paged_", attnpack::kv_cache_append_paged_cpu); }
