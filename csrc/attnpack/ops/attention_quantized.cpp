#include <attnpack/ops/detail/attention_quantized.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/quantize.h>

namespace attnpack {
namespace {

AttentionResult formula_op(const Tensor& query, const Tensor& key, const Tensor& value, int64_t bits,
                           c10::SymInt v_head_dim, const AttentionArguments& args) {
  return attention_quantized_formula(query, key, value, bits, v_head_dim, args);
}

}  // namespace

AttentionResult attention_quantized(const Tensor& query, const Tensor& key, const Tensor& value, int64_t bits,
                                    const c10::SymInt& v_head_dim, const AttentionArguments& args) {
  static const DispatchedOp<decltype(formula_op)> op("attnpack::attention_quantized");
  return op(query, key, value, bits, v_head_dim, args);
}

Tensor stand_in(const Tensor& rows, const Tensor& query, const c10::SymInt& dim) {
  return at::empty_symint({dim}, query.options())
      .expand_symint({rows.sym_size(0), rows.sym_size(1), rows.sym_size(2), dim});
}

void check_attention_quantized(const Tensor& query, const Tensor& key, const Tensor& value, int64_t bits,
                               const c10::SymInt& v_head_dim, const AttentionArguments& args) {
  ATTNPACK_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, "query has shape ", query.sym_sizes(),
                 ", key ", key.sym_sizes(), ", value ", value.sym_sizes(),
                 ": each wants [batch, heads, length, width]");
  ATTNPACK_CHECK(key.device() == query.device() && value.device() == query.device(), "query is on ", query.device(),
                 ", key on ", key.device(), ", value on ", value.device(), ": move them to one device");
  check_dequantize_rows(key, bits, query.sym_size(3), query.scalar_type());
  check_dequantize_rows(value, bits, v_head_dim, query.scalar_type());
  check_attention(query, stand_in(key, query, query.sym_size(3)), stand_in(value, query, v_head_dim), args);
}

AttentionResult attention_quantized_formula(const Tensor& query, const Tensor& key, const Tensor& value, int64_t bits,
                                            const c10::SymInt& v_head_dim, const AttentionArguments& args) {
  check_attention_quantized(query, key, value, bits, v_head_dim, args);
  const auto dtype = query.scalar_type();
  return attention_op(query, dequantize_rows(key, bits, query.sym_size(3), dtype),
                      dequantize_rows(value, bits, v_head_dim, dtype), args);
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("attention_quantized(Tensor query, Tensor key, Tensor value, int bits, SymInt v_head_dim, "  //
        ATTNPACK_ATTENTION_SCHEMA ") -> (Tensor, Tensor)");
}
