#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/rope.h>
#include <attnpack/ops/rope_args.h>

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
  ATTNPACK_CHECK(cos.dim() >= 1 && cos.dim() <= x.dim() && 2 * cos.sym_size(-1) <= x.sym_size(-1), "cos has shape ",
                 cos.sym_sizes(), ", wants to broadcast to [..., length, r/2] with r <= head_dim = ", x.sym_size(-1));
  for (int64_t i = 2; i <= cos.dim(); ++i)
    ATTNPACK_CHECK(cos.sym_size(-i) == 1 || cos.sym_size(-i) == x.sym_size(-i), "cos has shape ", cos.sym_sizes(),
                   ", which does not broadcast to [..., length, r/2] of x ", x.sym_sizes());
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
  const Tensor turned = at::stack({first * c - second * s, second * c + first * s}, pair).flatten(-2);
  return at::cat({turned.to(x.scalar_type()), x.narrow_symint(-1, 2 * half, x.sym_size(-1) - 2 * half)}, -1);
}

Tensor apply_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("attnpack::apply_rope", "")
                             .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, bool)>();
  return op.call(x, cos, sin, interleaved);
}

std::tuple<Tensor, Tensor> rope_table(const Tensor& positions, at::ArrayRef<double> inv_freq, double factor) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("attnpack::rope_table", "")
                             .typed<std::tuple<Tensor, Tensor>(const Tensor&, at::ArrayRef<double>, double)>();
  return op.call(positions, inv_freq, factor);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("apply_rope(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor");
  m.def("rope_table(Tensor positions, float[] inv_freq, float factor) -> (Tensor, Tensor)");
}
