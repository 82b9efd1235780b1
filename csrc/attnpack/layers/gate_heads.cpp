#include <attnpack/layers/gate_heads.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/padded.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {

namespace {

using at::Tensor;
using c10::SymInt;

void check_gate(const Tensor& joined, const Tensor& gate, const SymInt& num_heads) {
  check_defined("joined", joined);
  check_defined("gate", gate);
  ATTNPACK_CHECK(num_heads >= 1, "num_heads is ", num_heads, ", wants at least 1");
  ATTNPACK_CHECK(joined.dim() == 3 && joined.sym_size(2) % num_heads == 0, "joined has shape ", joined.sym_sizes(),
                 ", wants [batch, length, num_heads * v_head_dim] with num_heads ", num_heads);
  const bool fits = gate.dim() == 3 && gate.sym_size(0) == joined.sym_size(0) && gate.sym_size(1) == joined.sym_size(1);
  ATTNPACK_CHECK(fits && (gate.sym_size(2) == num_heads || gate.sym_size(2) == joined.sym_size(2)), "gate has shape ",
                 gate.sym_sizes(), ", wants [", joined.sym_size(0), ", ", joined.sym_size(1), ", ", num_heads,
                 "], one number per head, or the shape of joined, [..., ", joined.sym_size(2), "]");
  ATTNPACK_CHECK(gate.is_floating_point() && joined.is_floating_point(), "gate has dtype ", gate.scalar_type(),
                 ", joined ", joined.scalar_type(), ", both want a floating dtype");
  ATTNPACK_CHECK(gate.device() == joined.device(), "gate is on ", gate.device(), ", joined on ", joined.device(),
                 ": move one of them with .to()");
}

Tensor gate_heads_composite(const Tensor& joined, const Tensor& gate, SymInt num_heads, c10::string_view activation) {
  check_gate_activation(std::string(activation));
  check_gate(joined, gate, num_heads);
  const Tensor factor = activation == "softplus" ? at::softplus(gate) : at::sigmoid(gate);
  if (gate.sym_size(2) == joined.sym_size(2)) return joined.mul(factor).to(joined.scalar_type());
  const Tensor heads = joined.unflatten_symint(2, {num_heads, joined.sym_size(2) / num_heads});
  return heads.mul(factor.unsqueeze(-1)).flatten(2).to(joined.scalar_type());
}

}  // namespace

void check_gate_activation(const std::string& activation) {
  ATTNPACK_CHECK(activation == "sigmoid" || activation == "softplus", "gate_activation: got '", activation,
                 "', want 'sigmoid' or 'softplus'");
}

Tensor gate_heads(const Tensor& joined, const Tensor& gate, int64_t num_heads, const std::string& activation) {
  static const DispatchedOp<decltype(gate_heads_composite)> op("attnpack::gate_heads");
  return op(joined, gate, num_heads, activation);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("gate_heads(Tensor joined, Tensor gate, SymInt num_heads, str activation) -> Tensor",
        attnpack::from_schema<attnpack::gate_heads_composite>);
}
