#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cpu/attention_params.h>
#include <attnpack/ops/cuda/composition.h>
#include <attnpack/ops/cuda/prepare.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/linear.h>
#include <attnpack/ops/rope_args.h>

// What surrounds attention in a layer: append to the cache, rotate, and project few rows.
namespace attnpack {
namespace {

void kv_cache_append_cuda(const Tensor& cache_key, const Tensor& cache_value, const Tensor& lengths, const Tensor& key,
                          const Tensor& value, const std::optional<Tensor>& new_lens, std::optional<c10::SymInt>) {
  check_kv_cache_append(cache_key, cache_value, lengths, key, value, new_lens);
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

// x with its leading dimensions as exactly two, where that is a view: [B, H, L, D].
Tensor four_dimensions(Tensor x) {
  while (x.dim() < 4) x = x.unsqueeze(0);
  return x;
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

// What the kernel takes; everything else is torch's linear, which also says what is wrong with it.
bool fits(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const auto dtype = input.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) && weight.scalar_type() == dtype &&
         weight.device() == input.device() &&
         (!bias || (bias->scalar_type() == dtype && bias->dim() == 1 && bias->device() == input.device() &&
                    bias->size(0) == weight.size(0))) &&
         input.dim() >= 1 && weight.dim() == 2 && weight.stride(1) == 1 && input.size(-1) == weight.size(1) &&
         weight.size(1) > 0 && input.numel() > 0 && input.numel() / weight.size(1) <= kFewRows;
}

Tensor linear_cuda(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CudaKernels* kernels = cuda_kernels(input.device().index());
  if (!kernels || !fits(input, weight, bias)) return at::linear(input, weight, bias);
  const Target target(input);
  auto shape = input.sizes().vec();
  shape.back() = weight.size(0);
  const Tensor out = at::empty(shape, input.options()), rows = input.contiguous();
  const Tensor offsets = bias ? bias->contiguous() : Tensor();
  LinearParams p{};
  p.rows = input.numel() / weight.size(1);
  p.inputs = weight.size(1);
  p.outputs = weight.size(0);
  p.dtype = kernel_dtype(input.scalar_type());
  p.input = rows.const_data_ptr();
  p.weight = weight.const_data_ptr();
  p.weight_stride = weight.stride(0);
  p.bias = bias ? offsets.const_data_ptr() : nullptr;
  p.out = out.mutable_data_ptr();
  check_launch(kernels->linear(p, target.device(), target.stream()));
  return out;
}

std::vector<Tensor> linears_cuda(const Tensor& input, at::TensorList weights, at::TensorList biases) {
  if (biases.size() != 0 && biases.size() != weights.size()) return linears_formula(input, weights, biases);  // raises
  std::vector<Tensor> outs;
  for (size_t i = 0; i < weights.size(); ++i)
    outs.push_back(linear_cuda(input, weights[i], biases.empty() ? std::nullopt : std::optional(biases[i])));
  return outs;
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
