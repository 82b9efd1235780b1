#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/rope_args.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/detail/unknown_sizes.h>
#include <attnpack/ops/rope.h>

namespace attnpack {

using at::Tensor;

void check_rope(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  ATTNPACK_CHECK(x.dim() >= 2 && at::isFloatingType(x.scalar_type()), "x has shape ", x.sym_sizes(), " and dtype ",
                 x.scalar_type(), ", wants a float tensor [..., length, head_dim]");
  ATTNPACK_CHECK(cos.sym_sizes() == sin.sym_sizes() && cos.scalar_type() == sin.scalar_type(), "cos has shape ",
                 cos.sym_sizes(), " and dtype ", cos.scalar_type(), ", sin ", sin.sym_sizes(), " and ",
                 sin.scalar_type(), ": they must agree");
  ATTNPACK_CHECK(cos.scalar_type() == at::kFloat || cos.scalar_type() == at::kDouble, "cos has dtype ",
                 cos.scalar_type(), ", wants float32 or float64: lower precision breaks long contexts");
  ATTNPACK_CHECK(cos.device() == x.device() && sin.device() == x.device(), "cos is on ", cos.device(), ", sin on ",
                 sin.device(), ", x on ", x.device(), ": move them to one device");
  ATTNPACK_CHECK(cos.dim() >= 1 && cos.dim() <= x.dim() && cos.sym_size(-1) <= x.sym_size(-1) / 2, "cos has shape ",
                 cos.sym_sizes(), ", wants to broadcast to [..., length, r/2] with r <= head_dim = ", x.sym_size(-1));
  for (int64_t i = 2; i <= cos.dim(); ++i)
    ATTNPACK_CHECK(is_one(cos.sym_size(-i)) || cos.sym_size(-i) == x.sym_size(-i), "cos has shape ", cos.sym_sizes(),
                   ", which does not broadcast to [..., length, r/2] of x ", x.sym_sizes());
}

Tensor four_dimensions(Tensor x) {
  while (x.dim() < 4) x = x.unsqueeze(0);
  return x.dim() == 4 ? x : x.flatten(0, x.dim() - 4);
}

Tensor rope_formula(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check_rope(x, cos, sin);
  const auto accumulation = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const c10::SymInt half = cos.sym_size(-1);
  const Tensor rotated = x.narrow_symint(-1, 0, 2 * half).to(accumulation);
  const Tensor c = cos.to(accumulation), s = sin.to(accumulation);
  const int64_t pair = interleaved ? -1 : -2;
  const auto pairs = interleaved ? rotated.unflatten_symint(-1, {half, 2}) : rotated.unflatten_symint(-1, {2, half});
  const Tensor first = pairs.select(pair, 0), second = pairs.select(pair, 1);
  const Tensor out = at::stack({first * c - second * s, second * c + first * s}, pair).flatten(-2);
  return at::cat({out.to(x.scalar_type()), x.narrow_symint(-1, 2 * half, x.sym_size(-1) - 2 * half)}, -1);
}

Tensor apply_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  static const DispatchedOp<decltype(apply_rope)> op("attnpack::apply_rope");
  return op(x, cos, sin, interleaved);
}

std::tuple<Tensor, Tensor> rope_table(const Tensor& positions, at::ArrayRef<double> inv_freq, double factor) {
  static const DispatchedOp<decltype(rope_table)> op("attnpack::rope_table");
  return op(positions, inv_freq, factor);
}

void check_rope_positions(const Tensor& positions) {
  ATTNPACK_CHECK(positions.scalar_type() == at::kLong, "positions has dtype ", positions.scalar_type(),
                 ", wants int64: call .long() on it");
}

void check_rope_by_length(const Tensor& positions, const std::optional<Tensor>& lengths, at::ArrayRef<double> inv_freq,
                          at::ArrayRef<double> long_inv_freq, int64_t trained_len) {
  ATTNPACK_CHECK(positions.scalar_type() == at::kLong && (positions.dim() == 1 || positions.dim() == 2),
                 "positions has shape ", positions.sym_sizes(), " and dtype ", positions.scalar_type(),
                 ", wants int64 [length] or [batch, length]");
  ATTNPACK_CHECK(!lengths || (lengths->dim() == 1 && at::isIntegralType(lengths->scalar_type(), false) &&
                              (positions.dim() == 1 || is_one(positions.sym_size(0)) || is_one(lengths->sym_size(0)) ||
                               positions.sym_size(0) == lengths->sym_size(0))),
                 "lengths has shape ", lengths->sym_sizes(), " and dtype ", lengths->scalar_type(),
                 ", wants integers [batch] as positions ", positions.sym_sizes(), " has");
  ATTNPACK_CHECK(!lengths || lengths->device() == positions.device(), "lengths is on ", lengths->device(),
                 ", positions on ", positions.device(), ": move one of them");
  ATTNPACK_CHECK(long_inv_freq.empty() || long_inv_freq.size() == inv_freq.size(), "long_inv_freq has ",
                 long_inv_freq.size(), " frequencies, wants as many as inv_freq, ", inv_freq.size(), ", or none");
  ATTNPACK_CHECK(trained_len > 0, "trained_len is ", trained_len, ", wants at least 1");
}

std::vector<c10::SymInt> rope_table_shape(const Tensor& positions, const std::optional<Tensor>& lengths,
                                          at::ArrayRef<double> inv_freq) {
  std::vector<c10::SymInt> shape;
  if (lengths || positions.dim() == 2) {
    const bool many = positions.dim() == 2 && (!lengths || !is_one(positions.sym_size(0)));
    shape.push_back(many ? positions.sym_size(0) : lengths->sym_size(0));
  }
  shape.push_back(positions.sym_size(-1));
  shape.emplace_back(static_cast<int64_t>(inv_freq.size()));
  return shape;
}

std::tuple<Tensor, Tensor> rope_table_by_length(const Tensor& positions, const std::optional<Tensor>& lengths,
                                                at::ArrayRef<double> inv_freq, double factor,
                                                at::ArrayRef<double> long_inv_freq, double growth,
                                                int64_t trained_len) {
  static const DispatchedOp<decltype(rope_table_by_length)> op("attnpack::rope_table_by_length");
  return op(positions, lengths, inv_freq, factor, long_inv_freq, growth, trained_len);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("apply_rope(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor");
  m.def("rope_table(Tensor positions, float[] inv_freq, float factor) -> (Tensor, Tensor)");
  m.def(
      "rope_table_by_length(Tensor positions, Tensor? lengths, float[] inv_freq, float factor, float[] long_inv_freq, "
      "float growth, int trained_len) -> (Tensor, Tensor)");
}
