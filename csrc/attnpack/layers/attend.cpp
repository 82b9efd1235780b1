#include <attnpack/layers/attend.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/layers/detail/block_sums.h>
#include <attnpack/layers/detail/dropped_keys.h>
#include <attnpack/layers/detail/mask_columns.h>
#include <attnpack/layers/detail/paged_keys.h>
#include <attnpack/layers/detail/place_tokens.h>
#include <attnpack/layers/detail/quantized_keys.h>
#include <attnpack/layers/sharded_attention.h>
#include <attnpack/ops/detail/schema.h>
#include <attnpack/ops/query_scale.h>

namespace attnpack {
namespace {

template <class Member, class Argument>
Member as_member(const Argument& argument) {
  if constexpr (std::is_same_v<Member, Argument>)
    return argument;
  else
    return *argument;
}

std::optional<CacheTensors> cache_tensors(const CacheArguments& cache) {
  if (!cache.key) return std::nullopt;
  ATTNPACK_CHECK(cache.value && cache.lengths, "cache has no value or no lengths: pass all of its tensors");
  ATTNPACK_CHECK(cache.bits == 0 || cache.bits == 8 || cache.bits == 4, "cache_bits: got ", cache.bits,
                 ", wants 8 or 4, or 0 for a cache that is not quantised");
  ATTNPACK_CHECK(cache.exact_key.has_value() == cache.exact_value.has_value() &&
                     (!cache.exact_key || (cache.bits && cache.dropped && cache.window >= -1 && cache.keep_first >= 0)),
                 "cache_exact_key and cache_exact_value want each other, cache_bits and cache_dropped");
  constexpr int64_t kMost = int64_t{1} << 40;  // sums of it do not overflow
  ATTNPACK_CHECK(cache.window <= kMost && cache.keep_first <= kMost, "cache_window is ", cache.window,
                 ", cache_keep_first ", cache.keep_first, ", each wants at most ", kMost);
  ATTNPACK_CHECK(cache.dropped || cache.keep_first == 0, "cache_keep_first: got ", cache.keep_first,
                 " without cache_dropped, wants 0 for a cache that drops nothing");
#define ATTNPACK_AS_MEMBER(type, name, value, text) as_member<type>(cache.name),
  return CacheTensors{ATTNPACK_CACHE_TENSORS(ATTNPACK_AS_MEMBER)};
#undef ATTNPACK_AS_MEMBER
}

BlockOptions block_options(const KeyChoice& choice) {
  return {choice.key_block, choice.top_blocks, choice.local_blocks, std::string(choice.scorer)};
}

void check_room_for_sums(const Tensor& sums, const Tensor& key, const c10::SymInt& key_block) {
  const auto blocks = (key.sym_size(2) + key_block - 1) / key_block;
  ATTNPACK_CHECK(sums.dim() == 4 && sums.sym_size(2) > blocks, "cache_block_sums has shape ", sums.sym_sizes(),
                 ", wants one block more than the ", blocks, " of the keys");
}

void check_selected_keys(const std::optional<CacheTensors>& cache, const LayerArguments& layer, bool causal,
                         const KeyChoice& choice) {
  const bool sums = cache && cache->block_sums;
  // A call that does not choose blocks by their mean would leave the sums behind the keys. Keys that are rotated when
  // they are read have no sums to keep.
  ATTNPACK_CHECK(
      !sums || (choice.top_blocks > 0 && choice.scorer == "mean" && !layer.rope.raw_keys && !cache->block_table),
      "cache_block_sums: got a tensor, but this call does not choose blocks of stored keys by their mean; use a "
      "DynamicCache");
  if (!choice.names_keys()) return;
  ATTNPACK_CHECK(!cache || (!cache->bits && !cache->dropped), "cache: got a ",
                 cache && cache->bits ? "QuantizedCache" : "SlidingWindowCache",
                 " for attention over named keys, want one that holds every position as it is; use a DynamicCache, "
                 "SparseCache, StaticCache or PagedCache");
  ATTNPACK_CHECK(!choice.key_index || choice.top_blocks == 0,
                 "key_index is given together with top_blocks, which chooses in its place: leave one of them out");
  if (!choice.key_index) check_blocks(block_options(choice), causal);
  if (sums) check_room_for_sums(*cache->block_sums, cache->key, choice.key_block);
}

// The arguments with the blocks that the queries of the tokens choose. Where they are seen to choose all, none are
// named: the call is the plain one, and so are its bits. (A traced length is a symbol, and the graph is to hold for
// others.)
AttentionArguments with_blocks(AttentionArguments args, const PlacedTokens& tokens, const KeyChoice& choice,
                               const std::optional<Tensor>& block_sums = std::nullopt) {
  const auto keys = tokens.key.sym_size(2).maybe_as_int();
  if (choice.top_blocks == 0 || (keys && choice.top_blocks >= (*keys + choice.key_block - 1) / choice.key_block))
    return args;
  args.key_block = choice.key_block;
  args.key_index = select_blocks(tokens.query, tokens.key, block_options(choice),
                                 {args.causal, args.q_offsets, args.kv_lens, args.mask}, block_sums);
  return args;
}

// The cache's sums with those of the new keys, if it keeps any.
std::optional<Tensor> sums_with_new(const std::optional<CacheTensors>& cache, const PlacedTokens& tokens,
                                    const c10::SymInt& new_len, const KeyChoice& choice) {
  if (!cache || !cache->block_sums) return std::nullopt;
  update_block_sums(*cache->block_sums, cache->key, *tokens.q_offsets, *tokens.kv_lens, new_len, choice.key_block);
  return cache->block_sums;
}

// The operator's arguments for the cache as it is to be read, but for those that the append decides.
AttentionArguments arguments_over(const std::optional<CacheTensors>& cache, const LayerArguments& layer,
                                  const KeyChoice& choice, const ScoreRules& rules, const c10::SymInt& q_len) {
  AttentionArguments args = attention_arguments(layer, rules, choice);
  if (!cache || !cache->dropped) return args;
  check_window_fits(*cache, args);
  if (args.mask) args.mask = mask_of_slots(*args.mask, *cache);
  if (!args.chunk) return args;
  return with_chunks_masked(std::move(args), new_positions(cache->lengths, q_len),
                            positions_of_slots(*cache).unsqueeze(1).unsqueeze(1));
}

PlacedTokens place_heads(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<CacheTensors>& cache, const LayerArguments& layer,
                         AttentionArguments args) {
  return place_tokens({query, key, value}, cache, layer,
                      [&](const Tensor& k, const Tensor& v, const std::optional<Tensor>& kv_lens) {
                        args.kv_lens = kv_lens;
                        check_attention(query, k, v, args);
                      });
}

// [B, H, L, Dv] -> [B, L, H * Dv]
Tensor join_heads(const Tensor& out) {
  const Tensor rows = out.transpose(1, 2);
  return rows.reshape_symint({rows.sym_size(0), rows.sym_size(1), rows.sym_size(2) * rows.sym_size(3)});
}

Tensor attend_placed(const PlacedTokens& tokens, const std::optional<CacheTensors>& cache, AttentionArguments args,
                     double dropout_p) {
  args.dropout_p = dropout_p;
  args.dropout_seed = dropout_seed(dropout_p, tokens.query.device());
  const auto [out, lse] = cache && cache->keep_first > 0 ? attend_first_and_window(tokens, *cache, args)
                                                         : attention_op(tokens.query, tokens.key, tokens.value, args);
  return join_heads(out);
}

Tensor attend_keys(const Tensor& query, const Tensor& key, const Tensor& value,
                   const std::optional<CacheTensors>& cache, const LayerArguments& layer, const KeyChoice& choice,
                   const ScoreRules& rules) {
  if (cache && cache->bits) {
    const auto [out, weights] = attend_quantized(query, key, value, *cache, layer, rules, /*need_weights=*/false);
    return join_heads(out);
  }
  AttentionArguments args = arguments_over(cache, layer, choice, rules, query.sym_size(2));
  const PlacedTokens tokens = place_heads(query, key, value, cache, layer, args);
  args.q_offsets = tokens.q_offsets;
  args.kv_lens = tokens.kv_lens;
  const auto sums = sums_with_new(cache, tokens, key.sym_size(2), choice);
  return attend_placed(tokens, cache, with_blocks(args, tokens, choice, sums), rules.dropout_p);
}

std::tuple<Tensor, Tensor> attend_keys_with_weights(const Tensor& query, const Tensor& key, const Tensor& value,
                                                    const std::optional<CacheTensors>& cache,
                                                    const LayerArguments& layer, const KeyChoice& choice,
                                                    const ScoreRules& rules, bool at_names) {
  if (cache && cache->bits) {
    const auto [out, weights] = attend_quantized(query, key, value, *cache, layer, rules, /*need_weights=*/true);
    return {join_heads(out), weights};
  }
  AttentionArguments args = arguments_over(cache, layer, choice, rules, query.sym_size(2));
  PlacedTokens tokens = place_heads(query, key, value, cache, layer, args);
  const bool slots = cache && cache->dropped;
  trim_to_longest(tokens, slots ? std::nullopt : layer.mask);
  if (slots) args.mask = mask_from(args.mask, 0, tokens.key.sym_size(2));
  args.q_offsets = tokens.q_offsets;
  args.kv_lens = tokens.kv_lens;
  args = with_blocks(args, tokens, choice, sums_with_new(cache, tokens, key.sym_size(2), choice));
  const Tensor weights = cache && cache->keep_first > 0 ? first_and_window_probabilities(tokens, *cache, args)
                                                        : probabilities(tokens.query, tokens.key, args, at_names);
  return {attend_placed(tokens, cache, args, rules.dropout_p), weights};
}

Tensor attend_composite(const Tensor& query, const Tensor& key, const Tensor& value, const CacheArguments& cache_args,
                        const LayerArguments& layer, const KeyChoice& choice, const ScoreRules& rules) {
  const auto cache = cache_tensors(cache_args);
  check_selected_keys(cache, layer, rules.causal, choice);
  if (!cache || !cache->block_table) return attend_keys(query, key, value, cache, layer, choice, rules);
  const LayerTokens tokens{query, key, value};
  if (reads_pages(tokens, layer, choice, rules)) return attend_pages(tokens, *cache, layer, rules);
  Tensor out;
  through_copy(tokens, *cache, layer,
               [&](const CacheTensors& copy) { out = attend_keys(query, key, value, copy, layer, choice, rules); });
  return out;
}

std::tuple<Tensor, Tensor> attend_with_weights_composite(const Tensor& query, const Tensor& key, const Tensor& value,
                                                         const CacheArguments& cache_args, const LayerArguments& layer,
                                                         const KeyChoice& choice, const ScoreRules& rules,
                                                         bool at_names) {
  const auto cache = cache_tensors(cache_args);
  check_selected_keys(cache, layer, rules.causal, choice);
  check_at_names(at_names, choice.key_index);
  if (!cache || !cache->block_table)
    return attend_keys_with_weights(query, key, value, cache, layer, choice, rules, at_names);
  std::tuple<Tensor, Tensor> result;
  through_copy({query, key, value}, *cache, layer, [&](const CacheTensors& copy) {
    result = attend_keys_with_weights(query, key, value, copy, layer, choice, rules, at_names);
  });
  return result;
}

// The tokens of a query over keys that are there already, and its arguments.
std::pair<PlacedTokens, AttentionArguments> place_shared(const Tensor& query, const Tensor& key, const Tensor& value,
                                                         const Tensor& lengths, const LayerArguments& layer,
                                                         const KeyChoice& choice, const ScoreRules& rules) {
  AttentionArguments args = attention_arguments(layer, rules, choice);
  check_selected_keys(std::nullopt, layer, rules.causal, choice);
  const PlacedTokens tokens = place_queries(query, {key, value, lengths}, layer, [&](const Tensor& k, const Tensor& v) {
    check_attention(query, k, v, args);
  });
  args.q_offsets = tokens.q_offsets;
  args.kv_lens = tokens.kv_lens;
  return {tokens, with_blocks(args, tokens, choice)};
}

Tensor attend_shared_composite(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lengths,
                               const LayerArguments& layer, const KeyChoice& choice, const ScoreRules& rules) {
  const auto [tokens, args] = place_shared(query, key, value, lengths, layer, choice, rules);
  return attend_placed(tokens, std::nullopt, args, rules.dropout_p);
}

std::tuple<Tensor, Tensor> attend_shared_with_weights_composite(const Tensor& query, const Tensor& key,
                                                                const Tensor& value, const Tensor& lengths,
                                                                const LayerArguments& layer, const KeyChoice& choice,
                                                                const ScoreRules& rules) {
  auto [tokens, args] = place_shared(query, key, value, lengths, layer, choice, rules);
  trim_to_longest(tokens, layer.mask);
  return {attend_placed(tokens, std::nullopt, args, rules.dropout_p),
          scores_formula(tokens.query, tokens.key, args, "probs")};
}

CacheArguments cache_arguments(const std::optional<CacheTensors>& cache) {
  if (!cache) return {};
#define ATTNPACK_AS_ARGUMENT(type, name, value, text) cache->name,
  return {ATTNPACK_CACHE_TENSORS(ATTNPACK_AS_ARGUMENT)};
#undef ATTNPACK_AS_ARGUMENT
}

}  // namespace

// A factor of a query commutes with its rotation, so queries are scaled first.
Tensor attend(const Tensor& unscaled, const Tensor& key, const Tensor& value, const AttendOptions& options) {
  const Tensor query = scale_queries(unscaled, options.query_scale);
  if (const auto* over = sharded_attention()) {
    refuse_named_keys(options.key_index, options.key_block);
    return over->attend(query, key, value, options);
  }
  static const DispatchedOp<decltype(attend_composite)> op("attnpack::attend");
  return op(query, key, value, cache_arguments(options.cache), layer_arguments(options), key_choice(options), options);
}

std::tuple<Tensor, Tensor> attend_with_weights(const Tensor& query, const Tensor& key, const Tensor& value,
                                               const AttendOptions& options, bool at_names) {
  refuse_context_parallel("weights are asked for", "ask one process for them");
  static const DispatchedOp<decltype(attend_with_weights_composite)> op("attnpack::attend_with_weights");
  return op(scale_queries(query, options.query_scale), key, value, cache_arguments(options.cache),
            layer_arguments(options), key_choice(options), options, at_names);
}

Tensor attend_shared(const Tensor& query, const AttendOptions& options) {
  refuse_context_parallel("kv_from is given", "leave it out");
  static const DispatchedOp<decltype(attend_shared_composite)> op("attnpack::attend_shared");
  ATTNPACK_CHECK(options.cache, "cache: got none, attend_shared wants the keys and values that it reads");
  return op(scale_queries(query, options.query_scale), options.cache->key, options.cache->value, options.cache->lengths,
            layer_arguments(options), key_choice(options), options);
}

std::tuple<Tensor, Tensor> attend_shared_with_weights(const Tensor& query, const AttendOptions& options) {
  refuse_context_parallel("kv_from is given", "leave it out");
  static const DispatchedOp<decltype(attend_shared_with_weights_composite)> op("attnpack::attend_shared_with_weights");
  ATTNPACK_CHECK(options.cache, "cache: got none, attend_shared wants the keys and values that it reads");
  return op(scale_queries(query, options.query_scale), options.cache->key, options.cache->value, options.cache->lengths,
            layer_arguments(options), key_choice(options), options);
}

std::tuple<Tensor, Tensor> rotate(const Tensor& query, const Tensor& key, const LayerInputs& inputs) {
  return rotate_tokens({query, key}, inputs.rope, {inputs.positions, inputs.cross, std::nullopt, inputs.kv_lens});
}

}  // namespace attnpack

#define ATTNPACK_ATTEND_SCHEMA                                                               \
  "(Tensor query, Tensor key, Tensor value" ATTNPACK_CACHE_SCHEMA ", " ATTNPACK_LAYER_SCHEMA \
  ", " ATTNPACK_KEY_CHOICE_SCHEMA ATTNPACK_RULES_SCHEMA

#define ATTNPACK_ATTEND_SHARED_SCHEMA                                               \
  "(Tensor query, Tensor key, Tensor value, Tensor lengths, " ATTNPACK_LAYER_SCHEMA \
  ", " ATTNPACK_KEY_CHOICE_SCHEMA ATTNPACK_RULES_SCHEMA ")"

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("attend" ATTNPACK_ATTEND_SCHEMA ") -> Tensor", attnpack::from_schema<attnpack::attend_composite>);
  m.def("attend_with_weights" ATTNPACK_ATTEND_SCHEMA ", bool at_names=False) -> (Tensor, Tensor)",
        attnpack::from_schema<attnpack::attend_with_weights_composite>);
  m.def("attend_shared" ATTNPACK_ATTEND_SHARED_SCHEMA " -> Tensor",
        attnpack::from_schema<attnpack::attend_shared_composite>);
  m.def("attend_shared_with_weights" ATTNPACK_ATTEND_SHARED_SCHEMA " -> (Tensor, Tensor)",
        attnpack::from_schema<attnpack::attend_shared_with_weights_composite>);
}

namespace attnpack {
namespace {

void register_attend_composites(torch::Library& m) {
  m.impl("attend", from_schema<attend_composite>);
  m.impl("attend_with_weights", from_schema<attend_with_weights_composite>);
}

}  // namespace
}  // namespace attnpack

// The schema says that the cache's tensors are written, and vmap has no rule for such ops. But without a cache nothing
// is written. For lazy tensors torch has a fallback, which breaks ops that write (ops/lazy).
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) { attnpack::register_attend_composites(m); }
TORCH_LIBRARY_IMPL(attnpack, Negative, m) { attnpack::register_attend_composites(m); }
TORCH_LIBRARY_IMPL(attnpack, Conjugate, m) { attnpack::register_attend_composites(m); }
