#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/ops/detail/rope_args.h>

namespace attnpack {
namespace {

using at::Tensor;

Tensor apply_rope_meta(const Tensor& x, const Tensor& cos, const Tensor& sin, bool) {
  check_rope(x, cos, sin);
  return at::empty_like(x);
}

std::tuple<Tensor, Tensor> rope_table_meta(const Tensor& positions, at::ArrayRef<double> inv_freq, double) {
  check_rope_positions(positions);
  auto shape = positions.sym_sizes().vec();
  shape.emplace_back(static_cast<int64_t>(inv_freq.size()));
  const auto table = [&] { return at::empty_symint(shape, positions.options().dtype(at::kFloat)); };
  return {table(), table()};
}

std::tuple<Tensor, Tensor> rope_table_by_length_meta(const Tensor& positions, const std::optional<Tensor>& lengths,
                                                     at::ArrayRef<double> inv_freq, double,
                                                     at::ArrayRef<double> long_inv_freq, double, int64_t trained_len) {
  check_rope_by_length(positions, lengths, inv_freq, long_inv_freq, trained_len);
  const auto shape = rope_table_shape(positions, lengths, inv_freq);
  const auto table = [&] { return at::empty_symint(shape, positions.options().dtype(at::kFloat)); };
  return {table(), table()};
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("apply_rope", attnpack::apply_rope_meta);
  m.impl("rope_table", attnpack::rope_table_meta);
  m.impl("rope_table_by_length", attnpack::rope_table_by_length_meta);
}
