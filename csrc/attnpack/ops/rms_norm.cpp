#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/rms_norm.h>

namespace attnpack {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  static const DispatchedOp<decltype(rms_norm)> op("attnpack::rms_norm");
  return op(x, weight, eps);
}

at::Tensor rms_norm_formula(const at::Tensor& x, const at::Tensor& weight, double eps) {
  ATTNPACK_CHECK(weight.dim() == 1, "weight has shape ", weight.sym_sizes(), ", wants [dim]");
  ATTNPACK_CHECK(x.dim() >= 1 && x.sym_size(-1) == weight.sym_size(0), "x has shape ", x.sym_sizes(), ", wants [..., ",
                 weight.sym_size(0), "] as weight is ", weight.sym_sizes());
  ATTNPACK_CHECK(at::isFloatingType(x.scalar_type()) && at::isFloatingType(weight.scalar_type()), "x has dtype ",
                 x.scalar_type(), ", weight ", weight.scalar_type(), ": both want a float dtype, call .float()");
  ATTNPACK_CHECK(x.device() == weight.device(), "x is on ", x.device(), ", weight on ", weight.device(),
                 ": move one of them with .to()");
  return at::rms_norm_symint(x, weight.sym_sizes(), weight, eps);
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight,
                                                double eps) {
  static const DispatchedOp<decltype(add_rms_norm)> op("attnpack::add_rms_norm");
  return op(x, added, weight, eps);
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_formula(const at::Tensor& x, const at::Tensor& added,
                                                        const at::Tensor& weight, double eps) {
  ATTNPACK_CHECK(added.sym_sizes() == x.sym_sizes() && added.scalar_type() == x.scalar_type(), "added has shape ",
                 added.sym_sizes(), " and dtype ", added.scalar_type(), ", wants ", x.sym_sizes(), " and ",
                 x.scalar_type(), " as x has");
  ATTNPACK_CHECK(added.device() == x.device(), "added is on ", added.device(), ", x on ", x.device(),
                 ": move one of them with .to()");
  const at::Tensor sum = x + added;
  return {sum, rms_norm_formula(sum, weight, eps)};
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor)");
}
