#include <torch/library.h>

#include <attnpack/ops/detail/attention_quantized.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

AttentionResult attention_quantized_meta(const Tensor& query, const Tensor& key, const Tensor& value, int64_t bits,
                                         c10::SymInt v_head_dim, const AttentionArguments& args) {
  check_attention_quantized(query, key, value, bits, v_head_dim, args);
  return attention_op(query, stand_in(key, query, query.sym_size(3)), stand_in(value, query, v_head_dim), args);
}

}  // namespace
}  // namespace attnpack

TORCH_LIBRARY_IMPL(attnpack, Meta, m) {
  m.impl("attention_quantized", attnpack::from_schema<attnpack::attention_quantized_meta>);
}
