#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/merge_states.h>

namespace attnpack {
namespace {

using at::Tensor;
using States = std::tuple<Tensor, Tensor>;

States merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  const auto device = out_a.device();
  ATTNPACK_CHECK(lse_a.device() == device && out_b.device() == device && lse_b.device() == device,
                 "merge_states: out_a is on ", device, ", lse_a on ", lse_a.device(), ", out_b on ", out_b.device(),
                 ", lse_b on ", lse_b.device(), ": move them to one device");
  ATTNPACK_CHECK(out_a.sym_sizes() == out_b.sym_sizes() && lse_a.sym_sizes() == lse_b.sym_sizes(),
                 "merge_states: out_a ", out_a.sym_sizes(), " and out_b ", out_b.sym_sizes(), ", lse_a ",
                 lse_a.sym_sizes(), " and lse_b ", lse_b.sym_sizes(), " must have the same shapes");
  ATTNPACK_CHECK(out_a.dim() >= 1 && at::isFloatingType(out_a.scalar_type()) && at::isFloatingType(lse_a.scalar_type()),
                 "merge_states: out_a has shape ", out_a.sym_sizes(), " and dtype ", out_a.scalar_type(),
                 ", lse_a dtype ", lse_a.scalar_type(),
                 ", wants float tensors [..., length, v_head_dim] and [..., length]");
  ATTNPACK_CHECK(lse_a.sym_sizes() == out_a.sym_sizes().slice(0, out_a.dim() - 1), "merge_states: lse_a has shape ",
                 lse_a.sym_sizes(), ", wants that of out_a without its last dimension");
  ATTNPACK_CHECK(out_a.scalar_type() == out_b.scalar_type() && lse_a.scalar_type() == lse_b.scalar_type(),
                 "merge_states: out_b is ", out_b.scalar_type(), " with lse_b ", lse_b.scalar_type(), ", wants ",
                 out_a.scalar_type(), " and ", lse_a.scalar_type(),
                 " as the other part: convert one of them with .to()");
  constexpr double kEmpty = -std::numeric_limits<double>::infinity();
  const Tensor empty = (lse_a == kEmpty).logical_and(lse_b == kEmpty);
  const Tensor lse = at::logaddexp(lse_a.masked_fill(empty, 0), lse_b.masked_fill(empty, 0));
  // A part without keys has weight 0, whatever it holds, even if both parts are empty.
  const auto share = [&](const Tensor& out, const Tensor& part) {
    const Tensor none = part == kEmpty;
    // exp has the gradient 0 only at -inf: its argument must not overflow, not even where the weight is 0.
    const Tensor weight = (part.masked_fill(none, 0) - lse).masked_fill(none, kEmpty).exp();
    return out.to(lse.scalar_type()).masked_fill(none.unsqueeze(-1), 0) * weight.unsqueeze(-1);
  };
  const Tensor out = share(out_a, lse_a) + share(out_b, lse_b);
  return {out.to(out_a.scalar_type()), lse.masked_fill(empty, kEmpty)};
}

}  // namespace

States merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  static const DispatchedOp<decltype(merge_states)> op("attnpack::merge_states");
  return op(out_a, lse_a, out_b, lse_b);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)", &attnpack::merge);
}
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) { m.impl("merge_states", &attnpack::merge); }
