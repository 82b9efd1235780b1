#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/cuda/target.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/linear_params.h>
#include <attnpack/ops/detail/rope_args.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/linear.h>

// What surrounds attention in a layer: append to the cache, rotate, and project few rows.
namespace attnpack {
namespace {

void kv_cache_append_cuda(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                          const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt>) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens);
  check_kv_cache_memory(cache_key, cache_value, lengths, key, value);
  if (key.size(2) == 0 || key.size(0) == 0) return;
  const CudaKernels* kernels = cuda_kernels(key.device().index());
  const bool whole_rows =
      (cache_key.stride(3) == 1 || cache_key.size(3) <= 1) && (cache_value.stride(3) == 1 || cache_value.size(3) <= 1);
  if (!kernels || !whole_rows) return kv_cache_append_composed(cache_key, cache_value, lengths, key, value, new_lens);
  const Target target(key);
  const Tensor counts = new_lens ? new_lens->to(at::kLong).contiguous() : Tensor();
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
    p.lengths = lengths.const_data_ptr<int64_t>();
    p.lengths_stride = lengths.stride(0);
    p.new_lens = new_lens ? counts.const_data_ptr<int64_t>() : nullptr;
    check_launch(kernels->append(p, target.device(), target.stream()));
  };
  write(cache_key, key);
  write(cache_value, value);
  new_lens ? lengths.add_(counts) : lengths.add_(key.size(2));
  lengths.clamp_max_(cache_key.size(2));
}

Tensor apply_rope_cuda(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const CudaKernels* kernels = cuda_kernels(x.device().index());
  if (!kernels || x.dim() > 4) return at::empty_like(x).copy_(rope_formula(x, cos, sin, interleaved));
  check_rope(x, cos, sin);
  const Target target(x);
  const Tensor out = at::empty_like(x);
  auto shape = x.sizes().vec();
  shape.back() = cos.size(-1);
  const Tensor from = four_dimensions(x), to = four_dimensions(out), c = four_dimensions(cos.expand(shape)),
               s = four_dimensions(sin.expand(shape));
  RopeParams p{};
  p.batch = from.size(0);
  p.num_heads = from.size(1);
  p.length = from.size(2);
  p.dim = from.size(3);
  p.half = cos.size(-1);
  p.dtype = kernel_dtype(x.scalar_type());
  p.interleaved = interleaved;
  p.wide_tables = cos.scalar_type() == at::kDouble;
  p.x = from.const_data_ptr();
  p.cos = c.const_data_ptr();
  p.sin = s.const_data_ptr();
  p.out = to.mutable_data_ptr();
  p.x_strides = kernel_strides(from);
  p.out_strides = kernel_strides(to);
  p.cos_strides = kernel_strides(c);
  p.sin_strides = kernel_strides(s);
  check_launch(kernels->rope(p, target.device(), target.stream()));
  return out;
}

Tensor linear_cuda(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CudaKernels* kernels = cuda_kernels(input.device().index());
  if (!kernels || !fits_few_rows(input, weight, bias)) return at::linear(input, weight, bias);
  const Target target(input);
  const PreparedLinear prepared = prepare_linear(input, weight, bias);
  check_launch(kernels->linear(prepared.params, target.device(), target.stream()));
  return prepared.out;
}

std::vector<Tensor> linears_cuda(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  return each_linear(linear_cuda, input, weights, biases);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("kv_cache_append_", attnpack::kv_cache_append_cuda);
  m.impl("kv_cache_append_rotated_", attnpack::kv_cache_append_rotated_composed);
  m.impl("apply_rope", attnpack::apply_rope_cuda);
  m.impl("linear", attnpack::linear_cuda);
  m.impl("linears", attnpack::linears_cuda);
}
