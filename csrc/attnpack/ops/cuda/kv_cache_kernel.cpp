#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/cuda/device_constants.h>
#include <attnpack/ops/cuda/ops.h>
#include <attnpack/ops/cuda/place_params.h>
#include <attnpack/ops/cuda/target.h>
#include <attnpack/ops/kv_cache.h>

namespace attnpack {

PlaceParams place_params(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                         const Tensor& value) {
  PlaceParams p{};
  p.batch = lengths.size(0);
  p.num_kv_heads = key.size(1);
  p.head_dim = key.size(-1);
  p.v_head_dim = value.size(-1);
  p.element_size = static_cast<int32_t>(key.element_size());
  p.key = key.const_data_ptr();
  p.value = value.const_data_ptr();
  p.cache_key = cache_key.mutable_data_ptr();
  p.cache_value = cache_value.mutable_data_ptr();
  p.lengths = lengths.mutable_data_ptr<int64_t>();
  p.lengths_stride = lengths.stride(0);
  return p;
}

namespace {

// The params of an append to a cache in one tensor. counts: new_lens as int64, which the caller keeps.
PlaceParams append_params(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                          const Tensor& value, const Tensor& counts, const std::optional<Tensor>& dropped) {
  PlaceParams p = place_params(cache_key, cache_value, lengths, key, value);
  p.new_positions = key.size(2);
  p.tokens = p.batch * p.new_positions;
  p.capacity = cache_key.size(2);
  p.key_strides = kernel_strides(key);
  p.value_strides = kernel_strides(value);
  p.cache_key_strides = kernel_strides(cache_key);
  p.cache_value_strides = kernel_strides(cache_value);
  if (counts.defined()) p.new_lens = counts.const_data_ptr<int64_t>();
  if (dropped) {
    p.dropped = dropped->const_data_ptr<int64_t>();
    p.dropped_stride = dropped->stride(0);
  }
  return p;
}

Tensor counts_of(const std::optional<Tensor>& new_lens) {
  return new_lens ? new_lens->to(at::kLong).contiguous() : Tensor();
}

}  // namespace

void kv_cache_append_cuda(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                          const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt>,
                          const std::optional<Tensor>& dropped) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens, dropped);
  check_kv_cache_memory(cache_key, cache_value, lengths, key, value);
  if (key.size(2) == 0 || key.size(0) == 0) return;
  const CudaKernels* kernels = cuda_kernels(key.device().index());
  if (!kernels) return kv_cache_append_composed(cache_key, cache_value, lengths, key, value, new_lens, dropped);
  const Target target(key);
  const Tensor counts = counts_of(new_lens);
  check_launch(kernels->place(append_params(cache_key, cache_value, lengths, key, value, counts, dropped),
                              target.device(), target.stream()));
}

Tensor kv_cache_append_rotated_cuda(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths,
                                    const Tensor& query, const Tensor& key, const Tensor& value,
                                    at::ArrayRef<double> inv_freq, double factor, bool interleaved,
                                    const std::optional<Tensor>& new_lens, std::optional<c10::SymInt> limit,
                                    const std::optional<Tensor>& dropped) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens, dropped);
  check_kv_cache_memory(cache_key, cache_value, lengths, key, value);
  check_rotated(query, key, inv_freq);
  const CudaKernels* kernels = cuda_kernels(key.device().index());
  if (!kernels || static_cast<int64_t>(inv_freq.size()) > kMostRopeHalf)
    return kv_cache_append_rotated_composed(cache_key, cache_value, lengths, query, key, value, inv_freq, factor,
                                            interleaved, new_lens, limit, dropped);
  const Target target(key);
  const Tensor rotated = at::empty_like(query), counts = counts_of(new_lens);
  const Tensor frequencies = on_device(inv_freq, key.device());
  PlaceParams p = append_params(cache_key, cache_value, lengths, key, value, counts, dropped);
  p.num_heads = query.size(1);
  p.dtype = kernel_dtype(key.scalar_type());
  p.rotates = true;
  p.interleaved = interleaved;
  p.half = static_cast<int64_t>(inv_freq.size());
  p.factor = factor;
  p.inv_freq = frequencies.const_data_ptr<double>();
  p.query = query.const_data_ptr();
  p.rotated = rotated.mutable_data_ptr();
  p.query_strides = kernel_strides(query);
  p.rotated_strides = kernel_strides(rotated);
  if (p.tokens > 0) check_launch(kernels->place(p, target.device(), target.stream()));
  return rotated;
}

}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("kv_cache_append_", attnpack::kv_cache_append_cuda);
  m.impl("kv_cache_append_rotated_", attnpack::kv_cache_append_rotated_cuda);
}
