#include <attnpack/layers/differential.h>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <attnpack/core/padded.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {

namespace {

using at::Tensor;
using c10::SymInt;

// [B, L, heads * W] -> [B, L, heads, W]
Tensor heads_of(const Tensor& joined, const SymInt& heads) {
  ATTNPACK_CHECK(joined.dim() == 3 && joined.is_floating_point() && joined.sym_size(2) % heads == 0,
                 "joined has shape ", joined.sym_sizes(), " and dtype ", joined.scalar_type(),
                 ", wants floating numbers [batch, length, heads * width] for ", heads, " heads");
  return joined.unflatten_symint(2, {heads, joined.sym_size(2) / heads});
}

Tensor pair_values_composite(const Tensor& value) {
  ATTNPACK_CHECK(value.dim() == 4 && value.sym_size(1) % 2 == 0, "value has shape ", value.sym_sizes(),
                 ", wants [batch, num_kv_heads, length, head_dim] with an even number of kv heads");
  const SymInt half = value.sym_size(1) / 2;
  const Tensor pair = at::cat({value.narrow_symint(1, 0, half), value.narrow_symint(1, half, half)}, -1);
  return at::cat({pair, pair}, 1);
}

// exp(q k), summed in fp32 at least.
Tensor exp_of_product(const Tensor& q, const Tensor& k) {
  ATTNPACK_CHECK(q.dim() == 1 && q.sym_sizes() == k.sym_sizes(), "lambdas have shapes ", q.sym_sizes(), " and ",
                 k.sym_sizes(), ", want [head_dim] all");
  ATTNPACK_CHECK(q.is_floating_point() && k.is_floating_point(), "lambdas have dtypes ", q.scalar_type(), " and ",
                 k.scalar_type(), ", want floating numbers all: convert them with .to()");
  const auto wide = at::toOpMathType(q.scalar_type());
  return (q * k).to(wide).sum().exp();
}

Tensor subtract_halves_composite(const Tensor& joined, SymInt num_heads, const Tensor& lambda_q1,
                                 const Tensor& lambda_k1, const Tensor& lambda_q2, const Tensor& lambda_k2,
                                 double lambda_init, double eps) {
  ATTNPACK_CHECK(num_heads >= 2 && num_heads % 2 == 0, "num_heads is ", num_heads, ", wants an even number");
  const Tensor heads = heads_of(joined, num_heads);
  const auto dtype = joined.scalar_type();
  const Tensor lambda =
      exp_of_product(lambda_q1, lambda_k1).to(dtype) - exp_of_product(lambda_q2, lambda_k2).to(dtype) + lambda_init;
  const SymInt half = num_heads / 2;
  const Tensor difference = heads.narrow_symint(2, 0, half) - lambda * heads.narrow_symint(2, half, half);
  return (at::rms_norm_symint(difference, {heads.sym_size(3)}, std::nullopt, eps) * (1 - lambda_init)).flatten(2);
}

Tensor subtract_pairs_composite(const Tensor& joined, const Tensor& lambdas) {
  ATTNPACK_CHECK(lambdas.dim() == 3 && lambdas.is_floating_point() && lambdas.sym_size(2) >= 1, "lambdas has shape ",
                 lambdas.sym_sizes(), " and dtype ", lambdas.scalar_type(),
                 ", wants floating numbers [batch, length, num_heads]");
  const Tensor heads = heads_of(joined, lambdas.sym_size(2) * 2);
  ATTNPACK_CHECK(lambdas.sym_size(0) == joined.sym_size(0) && lambdas.sym_size(1) == joined.sym_size(1),
                 "lambdas has shape ", lambdas.sym_sizes(), ", wants batch and length of joined ", joined.sym_sizes());
  const Tensor pairs = heads.unflatten_symint(2, {lambdas.sym_size(2), SymInt(2)});
  const Tensor difference = pairs.select(3, 0) - lambdas.sigmoid().unsqueeze(-1) * pairs.select(3, 1);
  return difference.flatten(2).to(joined.scalar_type());
}

}  // namespace

Tensor pair_values(const Tensor& value) {
  static const DispatchedOp<decltype(pair_values_composite)> op("attnpack::pair_values");
  return op(value);
}

Tensor subtract_halves(const Tensor& joined, int64_t num_heads, const DifferentialLambdas& l, double lambda_init,
                       double eps) {
  static const DispatchedOp<decltype(subtract_halves_composite)> op("attnpack::subtract_halves");
  return op(joined, num_heads, l.q1, l.k1, l.q2, l.k2, lambda_init, eps);
}

Tensor subtract_pairs(const Tensor& joined, const Tensor& lambdas) {
  static const DispatchedOp<decltype(subtract_pairs_composite)> op("attnpack::subtract_pairs");
  return op(joined, lambdas);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  using namespace attnpack;
  m.def("pair_values(Tensor value) -> Tensor", from_schema<pair_values_composite>);
  m.def(
      "subtract_halves(Tensor joined, SymInt num_heads, Tensor lambda_q1, Tensor lambda_k1, Tensor lambda_q2, Tensor "
      "lambda_k2, float lambda_init, float eps) -> Tensor",
      from_schema<subtract_halves_composite>);
  m.def("subtract_pairs(Tensor joined, Tensor lambdas) -> Tensor", from_schema<subtract_pairs_composite>);
}
