#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/cuda/target.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/kv_cache.h>

namespace attnpack {
namespace {

void kv_cache_append_cuda(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                          const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt>,
                          const std::optional<Tensor>& dropped) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens, dropped);
  check_kv_cache_memory(cache_key, cache_value, lengths, key, value);
  if (key.size(2) == 0 || key.size(0) == 0) return;
  const CudaKernels* kernels = cuda_kernels(key.device().index());
  const bool whole_rows =
      (cache_key.stride(3) == 1 || cache_key.size(3) <= 1) && (cache_value.stride(3) == 1 || cache_value.size(3) <= 1);
  if (!kernels || !whole_rows)
    return kv_cache_append_composed(cache_key, cache_value, lengths, key, value, new_lens, dropped);
  const Target target(key);
  const Tensor counts = new_lens ? new_lens->to(at::kLong).contiguous() : at::full_like(lengths, key.size(2));
  const Tensor held = dropped ? lengths - *dropped : lengths;  // slots in use
  const auto write = [&](const Tensor& cache, const Tensor& x) {
    const Tensor rows = unit_last_stride(x);
    const int64_t size = static_cast<int64_t>(x.element_size());
    const auto in_bytes = [&](const Tensor& t) {
      return Strides{t.stride(0) * size, t.stride(1) * size, t.stride(2) * size, size};
    };
    AppendParams p{};
    p.batch = x.size(0);
    p.num_kv_heads = x.size(1);
    p.new_positions = x.size(2);
    p.capacity = cache.size(2);
    p.row_bytes = x.size(3) * size;
    p.from = rows.const_data_ptr();
    p.to = cache.mutable_data_ptr();
    p.from_strides = in_bytes(rows);
    p.to_strides = in_bytes(cache);
    p.lengths = held.const_data_ptr<int64_t>();
    p.lengths_stride = held.stride(0);
    p.new_lens = new_lens ? counts.const_data_ptr<int64_t>() : nullptr;
    check_launch(kernels->append(p, target.device(), target.stream()));
  };
  write(cache_key, key);
  write(cache_value, value);
  add_up_to_capacity(lengths, counts, cache_key.size(2), dropped);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("kv_cache_append_", attnpack::kv_cache_append_cuda);
  m.impl("kv_cache_append_rotated_", attnpack::kv_cache_append_rotated_composed);
}
