#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/swiglu.h>

namespace attnpack {

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  static const DispatchedOp<decltype(swiglu)> op("attnpack::swiglu");
  return op(gate, up);
}

at::Tensor swiglu_formula(const at::Tensor& gate, const at::Tensor& up) {
  ATTNPACK_CHECK(gate.sym_sizes() == up.sym_sizes(), "up has shape ", up.sym_sizes(), ", wants ", gate.sym_sizes(),
                 " as gate has");
  ATTNPACK_CHECK(at::isFloatingType(gate.scalar_type()) && at::isFloatingType(up.scalar_type()), "gate has dtype ",
                 gate.scalar_type(), ", up ", up.scalar_type(), ": both want a float dtype, call .float()");
  ATTNPACK_CHECK(gate.device() == up.device(), "gate is on ", gate.device(), ", up on ", up.device(),
                 ": move one of them with .to()");
  return at::silu(gate) * up;
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) { m.def("swiglu(Tensor gate, Tensor up) -> Tensor"); }
