#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <attnpack/core/check.h>
#include <attnpack/core/extremes.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/sequences.h>

namespace attnpack {

using c10::SymInt;

std::vector<SymInt> linear_state_shape(const Tensor& query, const Tensor& value, const LinearAttentionArguments& args) {
  return {count_sequences(args.cu_seqlens, query), value.sym_size(1), query.sym_size(3), value.sym_size(3)};
}
std::vector<SymInt> linear_out_shape(const Tensor& query, const Tensor& value) {
  return {query.sym_size(0), value.sym_size(1), query.sym_size(2), value.sym_size(3)};
}

double linear_scale(const Tensor& query, const LinearAttentionArguments& args) {
  return args.scale ? *args.scale : default_scale(query.size(3));
}

void check_linear_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                            const LinearAttentionArguments& args) {
  const FirstArgument first{"query", query};
  const auto dtype = query.scalar_type();
  for (const auto& [name, x] : {std::pair("query", &query), {"key", &key}, {"value", &value}}) {
    ATTNPACK_CHECK(x->dim() == 4, name, ": got ", x->sym_sizes(), ", want 4 dimensions [B, H, L, D]: split ",
                   "[B, L, H * D] with .unflatten(-1, (H, D)).transpose(1, 2)");
    ATTNPACK_CHECK(is_element(x->scalar_type()), name, ": got ", x->scalar_type(),
                   ", want float64, float32, bfloat16 or float16: call .float() on it");
    ATTNPACK_CHECK(x->scalar_type() == dtype, name, ": got ", x->scalar_type(), ", want ", dtype,
                   " as query: cast them to one with .to()");
    check_beside(name, *x, first);
  }
  const SymInt batch = query.sym_size(0), key_heads = query.sym_size(1), length = query.sym_size(2),
               dim = query.sym_size(3), heads = value.sym_size(1);
  ATTNPACK_CHECK(has_shape(key, {batch, key_heads, length, dim}), "key: got ", key.sym_sizes(), ", want ",
                 query.sym_sizes(), " as query");
  ATTNPACK_CHECK(value.sym_size(0) == batch && value.sym_size(2) == length, "value: got ", value.sym_sizes(),
                 ", want [B, Hv, L, Dv] = [", batch, ", Hv, ", length, ", Dv] as query is ", query.sym_sizes());
  ATTNPACK_CHECK(key_heads == 0 ? heads == 0 : heads % key_heads == 0, "value: got ", heads,
                 " heads, want a multiple of the ", key_heads, " of query and key");
  if (args.log_decay && args.log_decay->dim() == 3)
    check_numbers("log_decay", args.log_decay, "[B, Hv, L]", {batch, heads, length}, first);
  else
    check_numbers("log_decay", args.log_decay, "[B, Hv, L, D], or without D,", {batch, heads, length, dim}, first);
  check_numbers("beta", args.beta, "[B, Hv, L]", {batch, heads, length}, first);
  check_sequences(args.kv_lens, args.cu_seqlens, first);
  check_numbers("initial_state", args.initial_state, "[sequences, Hv, D, Dv]", linear_state_shape(query, value, args),
                first);
}

void check_linear_attention_in_place(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state,
                                     const OwnedStateArguments& args) {
  check_numbers("state", state, "[sequences, Hv, D, Dv]", linear_state_shape(query, value, args.from(state)),
                {"query", query});
  check_linear_attention(query, key, value, args.from(state));
  const auto wide = accumulation_type(query);
  ATTNPACK_CHECK(state.scalar_type() == wide, "state: got ", state.scalar_type(), ", want ", wide,
                 ", in which states are written: cast it with .to()");
  ATTNPACK_CHECK(state.is_contiguous_or_false() || !state.is_cpu(), "state: got strides ", state.strides(),
                 ", want a contiguous tensor, which is written in place: call .contiguous() on it first");
  if (!state.is_cpu() || at::isTensorSubclassLike(state)) return;
  const auto check_apart = [&](const char* name, const Tensor& x) {
    ATTNPACK_CHECK(x.numel() == 0 || state.numel() == 0 || x.storage().data() != state.storage().data() ||
                       at::get_overlap_status(state, x) == at::MemOverlapStatus::No,
                   name, " shares memory with state, which is written while it is read: call clone() on it");
  };
  check_apart("query", query);
  check_apart("key", key);
  check_apart("value", value);
  if (args.log_decay) check_apart("log_decay", *args.log_decay);
  if (args.beta) check_apart("beta", *args.beta);
}

Tensor linear_attention_by_copy(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state,
                                const OwnedStateArguments& args) {
  const auto [out, next] = linear_attention_op(query, key, value, args.from(state));
  state.copy_(next);
  return out;
}

void check_linear_attention_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                     const Tensor& query, const Tensor& key, const Tensor& value,
                                     const LinearAttentionArguments& args) {
  check_linear_attention(query, key, value, args);
  const FirstArgument first{"query", query};
  check_numbers("grad_out", grad_out, "[B, Hv, L, Dv]", linear_out_shape(query, value), first);
  check_numbers("grad_state", grad_state, "[sequences, Hv, D, Dv]", linear_state_shape(query, value, args), first);
}

}  // namespace attnpack
