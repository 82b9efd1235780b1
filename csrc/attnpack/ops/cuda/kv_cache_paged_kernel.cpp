#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/ops.h>
#include <attnpack/ops/cuda/place_params.h>
#include <attnpack/ops/cuda/target.h>
#include <attnpack/ops/detail/varlen_arguments.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/kv_cache_paged.h>

namespace attnpack {
namespace {

// A composition: one copy for each run of rows in a page. It reads the numbers, so it waits for the device.
void append_runs(const Tensor& key_pool, const Tensor& value_pool, const Tensor& lengths, const Tensor& key,
                 const Tensor& value, const PagedPlaces& places) {
  for (const PageRun& run : places.runs) {
    rows_in_pool(key_pool, run).copy_(new_rows(key, run));
    rows_in_pool(value_pool, run).copy_(new_rows(value, run));
  }
  lengths.add_(at::tensor(places.counts, at::kLong).to(lengths.device()));
}

// The strides of [B, Hkv, L, D], or of packed rows [T, Hkv, D].
Strides strides_of_new(const Tensor& x) {
  return x.dim() == 4 ? kernel_strides(x) : Strides{0, x.stride(1), x.stride(0), x.stride(2)};
}

}  // namespace

void kv_cache_append_paged_cuda(const Tensor& key_pool, const Tensor& value_pool, const Tensor& block_table,
                                const Tensor& lengths, const Tensor& key, const Tensor& value,
                                const std::optional<Tensor>& new_lens, const std::optional<Tensor>& cu_seqlens) {
  check_kv_cache_append_paged(key_pool, value_pool, block_table, lengths, key, value, new_lens, cu_seqlens);
  const CudaKernels* kernels = cuda_kernels(key.device().index());
  // The kernel reads lengths and table on the device, drops what has no place there, and raises nothing.
  if (!kernels || checks_numbers() || lengths.device() != key.device()) {
    const PagedPlaces places =
        find_paged_places(key_pool, value_pool, block_table, lengths, key, value, new_lens, cu_seqlens);
    return append_runs(key_pool, value_pool, lengths, key, value, places);
  }
  check_kv_cache_memory(key_pool, value_pool, lengths, key, value);
  const int64_t tokens = cu_seqlens ? key.size(0) : key.size(0) * key.size(2);
  if (tokens == 0) return;
  const Target target(key);
  const auto numbers = [&](const std::optional<Tensor>& x) {
    return x ? x->to(key.device(), at::kLong).contiguous() : Tensor();
  };
  const Tensor table = block_table.to(key.device()).contiguous(), counts = numbers(new_lens),
               ends = numbers(cu_seqlens);
  PlaceParams p = place_params(key_pool, value_pool, lengths, key, value);
  p.tokens = tokens;
  p.new_positions = cu_seqlens ? 0 : key.size(2);
  p.page_size = key_pool.size(1);
  p.num_pages = key_pool.size(0);
  p.capacity = table.size(1) * p.page_size;
  p.key_strides = strides_of_new(key);
  p.value_strides = strides_of_new(value);
  p.cache_key_strides = kernel_strides(batch_of_pages(key_pool));
  p.cache_value_strides = kernel_strides(batch_of_pages(value_pool));
  p.block_table = table.const_data_ptr<int32_t>();
  p.table_stride = table.size(1);
  if (counts.defined()) p.new_lens = counts.const_data_ptr<int64_t>();
  if (ends.defined()) p.cu_seqlens = ends.const_data_ptr<int64_t>();
  check_launch(kernels->place(p, target.device(), target.stream()));
}

}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) { m.impl("kv_cache_append_paged_", attnpack::kv_cache_append_paged_cuda); }
