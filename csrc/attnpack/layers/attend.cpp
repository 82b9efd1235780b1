#include <attnpack/layers/attend.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/layers/detail/place_tokens.h>
#include <attnpack/ops/detail/schema.h>

namespace attnpack {
namespace {

std::optional<CacheTensors> cache_tensors(const CacheArguments& cache) {
  if (!cache.key) return std::nullopt;
  ATTNPACK_CHECK(cache.value && cache.lengths, "cache has no value or no lengths: pass all three of its tensors");
  return CacheTensors{*cache.key, *cache.value, *cache.lengths};
}

PlacedTokens place_heads(const Tensor& query, const Tensor& key, const Tensor& value, const CacheArguments& cache,
                         const LayerArguments& layer, AttentionArguments args) {
  return place_tokens({query, key, value}, cache_tensors(cache), layer,
                      [&](const Tensor& k, const Tensor& v, const std::optional<Tensor>& kv_lens) {
                        args.kv_lens = kv_lens;
                        check_attention(query, k, v, args);
                      });
}

Tensor attend_placed(const PlacedTokens& tokens, AttentionArguments args, double dropout_p) {
  args.dropout_p = dropout_p;
  args.dropout_seed = dropout_seed(dropout_p);
  return std::get<0>(attention_op(tokens.query, tokens.key, tokens.value, args)).transpose(1, 2).flatten(2);
}

Tensor attend_composite(const Tensor& query, const Tensor& key, const Tensor& value, const CacheArguments& cache,
                        const LayerArguments& layer, const ScoreArguments& score) {
  AttentionArguments args = attention_arguments(layer, score);
  const PlacedTokens tokens = place_heads(query, key, value, cache, layer, args);
  args.q_offsets = tokens.q_offsets;
  args.kv_lens = tokens.kv_lens;
  return attend_placed(tokens, args, layer.dropout_p);
}

std::tuple<Tensor, Tensor> attend_with_weights_composite(const Tensor& query, const Tensor& key, const Tensor& value,
                                                         const CacheArguments& cache, const LayerArguments& layer,
                                                         const ScoreArguments& score) {
  AttentionArguments args = attention_arguments(layer, score);
  PlacedTokens tokens = place_heads(query, key, value, cache, layer, args);
  trim_to_longest(tokens, layer.mask);
  args.q_offsets = tokens.q_offsets;
  args.kv_lens = tokens.kv_lens;
  return {attend_placed(tokens, args, layer.dropout_p), scores_formula(tokens.query, tokens.key, args, "probs")};
}

CacheArguments cache_arguments(const std::optional<CacheTensors>& cache) {
  if (!cache) return {};
  return {cache->key, cache->value, cache->lengths};
}

}  // namespace

Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const AttendOptions& options) {
  static const DispatchedOp<decltype(attend_composite)> op("attnpack::attend");
  return op(query, key, value, cache_arguments(options.cache), layer_arguments(options), score_arguments(options));
}

std::tuple<Tensor, Tensor> attend_with_weights(const Tensor& query, const Tensor& key, const Tensor& value,
                                               const AttendOptions& options) {
  static const DispatchedOp<decltype(attend_with_weights_composite)> op("attnpack::attend_with_weights");
  return op(query, key, value, cache_arguments(options.cache), layer_arguments(options), score_arguments(options));
}

std::tuple<Tensor, Tensor> rotate(const Tensor& query, const Tensor& key, const LayerInputs& inputs) {
  return rotate_tokens({query, key}, inputs.rope, {inputs.positions, inputs.cross, std::nullopt, inputs.kv_lens});
}

}  // namespace attnpack

#define ATTNPACK_ATTEND_SCHEMA                                                                 \
  "(Tensor query, Tensor key, Tensor value, " ATTNPACK_CACHE_SCHEMA ", " ATTNPACK_LAYER_SCHEMA \
  ", " ATTNPACK_SCORE_SCHEMA ")"

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("attend" ATTNPACK_ATTEND_SCHEMA " -> Tensor", attnpack::from_schema<attnpack::attend_composite>);
  m.def("attend_with_weights" ATTNPACK_ATTEND_SCHEMA " -> (Tensor, Tensor)",
        attnpack::from_schema<attnpack::attend_with_weights_composite>);
}

namespace attnpack {
namespace {

void register_composites(torch::Library& m) {
  m.impl("attend", from_schema<attend_composite>);
  m.impl("attend_with_weights", from_schema<attend_with_weights_composite>);
}

}  // namespace
}  // namespace attnpack

// The schema says that the cache's tensors are written, and vmap has no rule for such ops. But without a cache nothing
// is written. For lazy tensors torch has a fallback, which breaks ops that write (ops/lazy).
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) { attnpack::register_composites(m); }
TORCH_LIBRARY_IMPL(attnpack, Negative, m) { attnpack::register_composites(m); }
TORCH_LIBRARY_IMPL(attnpack, Conjugate, m) { attnpack::register_composites(m); }
