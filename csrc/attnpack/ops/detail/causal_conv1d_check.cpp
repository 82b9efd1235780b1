#include <ATen/ATen.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/causal_conv1d_arguments.h>
#include <attnpack/ops/detail/sequences.h>

namespace attnpack {

using c10::SymInt;

std::vector<SymInt> conv_state_shape(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args) {
  return {count_sequences(args.cu_seqlens, x), x.sym_size(2), weight.sym_size(1) - 1};
}

void check_causal_conv1d(const Tensor& x, const Tensor& weight, const CausalConv1dArguments& args) {
  const FirstArgument first{"x", x};
  ATTNPACK_CHECK(x.dim() == 3, "x: got ", x.sym_sizes(), ", want [B, L, C]: [B, C, L] is one by .transpose(1, 2)");
  ATTNPACK_CHECK(is_element(x.scalar_type()), "x: got ", x.scalar_type(),
                 ", want float64, float32, bfloat16 or float16: call .float() on it");
  ATTNPACK_CHECK(weight.dim() == 2 && weight.sym_size(1) >= 1, "weight: got ", weight.sym_sizes(),
                 ", want [C, K] with K of at least 1: that of a Conv1d is one by .squeeze(1)");
  const SymInt channels = x.sym_size(2);
  check_numbers("weight", weight, "[C, K]", {channels, weight.sym_size(1)}, first);
  check_numbers("bias", args.bias, "[C]", {channels}, first);
  check_sequences(args.kv_lens, args.cu_seqlens, first);
  check_numbers("initial_state", args.initial_state, "[sequences, C, K - 1]", conv_state_shape(x, weight, args), first);
}

void check_causal_conv1d_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_state, const Tensor& x,
                                  const Tensor& weight, const CausalConv1dArguments& args) {
  check_causal_conv1d(x, weight, args);
  check_numbers("grad_out", grad_out, "[B, L, C]", x.sym_sizes().vec(), {"x", x});
  check_numbers("grad_state", grad_state, "[sequences, C, K - 1]", conv_state_shape(x, weight, args), {"x", x});
}

Tensor empty_rows_as(const Tensor& x) {
  const bool across = !x.is_contiguous_or_false() && x.transpose(1, 2).is_contiguous_or_false();
  if (!across) return at::empty_symint(x.sym_sizes(), x.options());
  return at::empty_symint({x.sym_size(0), x.sym_size(2), x.sym_size(1)}, x.options()).transpose(1, 2);
}

Tensor laid_as_rows(const Tensor& x, const Tensor& rows) {
  const bool across = !x.is_contiguous_or_false() && x.transpose(1, 2).is_contiguous_or_false();
  return across ? rows.transpose(1, 2).contiguous().transpose(1, 2) : rows.contiguous();
}

Tensor empty_conv_state(c10::SymIntArrayRef shape, const at::TensorOptions& options) {
  return at::empty_symint({shape[0], shape[2], shape[1]}, options).transpose(1, 2);
}

Tensor laid_as_conv_state(const Tensor& state) { return state.transpose(1, 2).contiguous().transpose(1, 2); }

}  // namespace attnpack
