#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/device_constants.h>
#include <attnpack/ops/cuda/target.h>
#include <attnpack/ops/detail/attention_params.h>
#include <attnpack/ops/detail/rope_args.h>

namespace attnpack {
namespace {

using at::Tensor;

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

std::tuple<Tensor, Tensor> rope_table_cuda(const Tensor& positions, at::ArrayRef<double> inv_freq, double factor) {
  check_rope_positions(positions);
  const Tensor angles = positions.unsqueeze(-1).to(at::kDouble) * on_device(inv_freq, positions.device());
  return {(angles.cos() * factor).to(at::kFloat), (angles.sin() * factor).to(at::kFloat)};
}

std::tuple<Tensor, Tensor> rope_table_by_length_cuda(const Tensor& positions, const std::optional<Tensor>& lengths,
                                                     at::ArrayRef<double> inv_freq, double factor,
                                                     at::ArrayRef<double> long_inv_freq, double growth,
                                                     int64_t trained_len) {
  check_rope_by_length(positions, lengths, inv_freq, long_inv_freq, trained_len);
  const auto options = at::TensorOptions(at::kDouble).device(positions.device());
  const auto trained = static_cast<double>(trained_len);
  Tensor seen = lengths ? *lengths : at::full({1}, trained_len, options);
  if (!lengths && positions.numel() > 0) seen = positions.amax(-1) + 1;
  seen = seen.to(at::kDouble).view({-1, 1}).clamp_min(trained);  // [B, 1]
  Tensor theta = on_device(inv_freq, positions.device());
  if (!long_inv_freq.empty()) {
    theta = at::where(seen > trained, on_device(long_inv_freq, positions.device()), theta);
  } else if (growth > 0) {
    const auto pairs = static_cast<int64_t>(inv_freq.size());
    const double r = 2.0 * static_cast<double>(pairs);
    theta = theta * (growth * seen / trained - (growth - 1)).pow(at::arange(pairs, options) * (-2 / (r - 2)));
  }
  const Tensor angles = (positions.unsqueeze(-1).to(at::kDouble) * theta.unsqueeze(-2))
                            .reshape_symint(rope_table_shape(positions, lengths, inv_freq));
  return {(angles.cos() * factor).to(at::kFloat), (angles.sin() * factor).to(at::kFloat)};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("apply_rope", attnpack::apply_rope_cuda);
  m.impl("rope_table", attnpack::rope_table_cuda);
  m.impl("rope_table_by_length", attnpack::rope_table_by_length_cuda);
}
