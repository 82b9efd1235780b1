#include <ATen/ATen.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/attention_arguments.h>
#include <attnpack/ops/detail/layout.h>
#include <attnpack/ops/detail/linear_attention_arguments.h>
#include <attnpack/ops/detail/read_numbers.h>

namespace attnpack {
namespace {

using c10::SymInt;
using Shape = std::vector<SymInt>;

bool has_shape(const Tensor& x, const Shape& shape) {
  bool fits = x.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = x.sym_size(static_cast<int64_t>(i)) == shape[i];
  return fits;
}

void check_beside(const char* name, const Tensor& x, const Tensor& query) {
  ATTNPACK_CHECK(x.device() == query.device(), name, " is on ", x.device(), ", query on ", query.device(),
                 ": move one of them with .to()");
}

// names: what the sizes of the shape are called.
void check_numbers(const char* name, const std::optional<Tensor>& x, const char* names, const Shape& shape,
                   const Tensor& query) {
  if (!x) return;
  ATTNPACK_CHECK(has_shape(*x, shape), name, ": got ", x->sym_sizes(), ", want ", names, " = ",
                 c10::SymIntArrayRef(shape));
  ATTNPACK_CHECK(at::isFloatingType(x->scalar_type()), name, ": got ", x->scalar_type(),
                 ", want a float dtype: call .float() on it");
  check_beside(name, *x, query);
}

void check_lengths(const char* name, const Tensor& x, const Tensor& query) {
  ATTNPACK_CHECK(is_int32_or_int64(x), name, ": got ", x.scalar_type(), ", want int32 or int64: call .long() on it");
  check_beside(name, x, query);
}

}  // namespace

std::vector<SymInt> linear_state_shape(const Tensor& query, const Tensor& value, const LinearAttentionArguments& args) {
  const SymInt sequences = args.cu_seqlens ? args.cu_seqlens->sym_size(0) - 1 : query.sym_size(0);
  return {sequences, value.sym_size(1), query.sym_size(3), value.sym_size(3)};
}
std::vector<SymInt> linear_out_shape(const Tensor& query, const Tensor& value) {
  return {query.sym_size(0), value.sym_size(1), query.sym_size(2), value.sym_size(3)};
}

double linear_scale(const Tensor& query, const LinearAttentionArguments& args) {
  const int64_t dim = query.size(3);
  return args.scale ? *args.scale : dim > 0 ? 1.0 / std::sqrt(static_cast<double>(dim)) : 1.0;
}

void check_linear_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                            const LinearAttentionArguments& args) {
  const auto dtype = query.scalar_type();
  for (const auto& [name, x] : {std::pair("query", &query), {"key", &key}, {"value", &value}}) {
    ATTNPACK_CHECK(x->dim() == 4, name, ": got ", x->sym_sizes(), ", want 4 dimensions [B, H, L, D]: split ",
                   "[B, L, H * D] with .unflatten(-1, (H, D)).transpose(1, 2)");
    ATTNPACK_CHECK(is_element(x->scalar_type()), name, ": got ", x->scalar_type(),
                   ", want float64, float32, bfloat16 or float16: call .float() on it");
    ATTNPACK_CHECK(x->scalar_type() == dtype, name, ": got ", x->scalar_type(), ", want ", dtype,
                   " as query: cast them to one with .to()");
    check_beside(name, *x, query);
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
    check_numbers("log_decay", args.log_decay, "[B, Hv, L]", {batch, heads, length}, query);
  else
    check_numbers("log_decay", args.log_decay, "[B, Hv, L, D], or without D,", {batch, heads, length, dim}, query);
  check_numbers("beta", args.beta, "[B, Hv, L]", {batch, heads, length}, query);
  if (args.cu_seqlens) {
    const Tensor& ends = *args.cu_seqlens;
    ATTNPACK_CHECK(ends.dim() == 1 && ends.sym_size(0) >= 1, "cu_seqlens: got ", ends.sym_sizes(),
                   ", want [sequences + 1]: where each sequence begins, and the end of the last");
    check_lengths("cu_seqlens", ends, query);
    ATTNPACK_CHECK(batch == 1, "cu_seqlens: got a batch of ", batch,
                   ", want packed sequences, one after the other in a batch of 1");
    ATTNPACK_CHECK(!args.kv_lens, "kv_lens: got a tensor beside cu_seqlens, want one of them: cu_seqlens says where ",
                   "each sequence ends");
  }
  if (args.kv_lens) {
    ATTNPACK_CHECK(has_shape(*args.kv_lens, {batch}), "kv_lens: got ", args.kv_lens->sym_sizes(), ", want [B] = [",
                   batch, "]: one number per sequence");
    check_lengths("kv_lens", *args.kv_lens, query);
  }
  check_numbers("initial_state", args.initial_state, "[sequences, Hv, D, Dv]", linear_state_shape(query, value, args),
                query);
}

void check_linear_attention_backward(const Tensor& grad_out, const std::optional<Tensor>& grad_state,
                                     const Tensor& query, const Tensor& key, const Tensor& value,
                                     const LinearAttentionArguments& args) {
  check_linear_attention(query, key, value, args);
  check_numbers("grad_out", grad_out, "[B, Hv, L, Dv]", linear_out_shape(query, value), query);
  check_numbers("grad_state", grad_state, "[sequences, Hv, D, Dv]", linear_state_shape(query, value, args), query);
}

std::vector<int64_t> read_sequence_ends(const Tensor& query, const LinearAttentionArguments& args) {
  const std::vector<int64_t> ends = read_numbers(*args.cu_seqlens);
  const int64_t length = query.size(2);
  ATTNPACK_CHECK(ends.front() == 0, "cu_seqlens[0]: got ", ends.front(), ", want 0: the first sequence begins there");
  for (size_t n = 0; n + 1 < ends.size(); ++n)
    ATTNPACK_CHECK(ends[n] <= ends[n + 1], "cu_seqlens[", n + 1, "]: got ", ends[n + 1], " after ", ends[n],
                   ", want numbers that never fall");
  ATTNPACK_CHECK(ends.back() == length, "cu_seqlens: got ", ends.back(), " at the end, want ", length,
                 ", the tokens of query");
  return ends;
}

}  // namespace attnpack
