#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/cuda/device_constants.h>
#include <attnpack/ops/detail/rope_args.h>

// Ops too small for kernels of their own, by compositions of ATen ops.
namespace attnpack {
namespace {

using at::Tensor;

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
    const double r = 2.0 * static_cast<double>(inv_freq.size());
    theta = theta * (growth * seen / trained - (growth - 1)).pow(at::arange(inv_freq.size(), options) * (-2 / (r - 2)));
  }
  const Tensor angles = (positions.unsqueeze(-1).to(at::kDouble) * theta.unsqueeze(-2))
                            .reshape_symint(rope_table_shape(positions, lengths, inv_freq));
  return {(angles.cos() * factor).to(at::kFloat), (angles.sin() * factor).to(at::kFloat)};
}

Tensor null_cuda(const Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); }

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, CUDA, m) {
  m.impl("rope_table", attnpack::rope_table_cuda);
  m.impl("rope_table_by_length", attnpack::rope_table_by_length_cuda);
  m.impl("null", attnpack::null_cuda);
}
