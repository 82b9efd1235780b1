#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/layers/attend.h>
#include <attnpack/ops/detail/attention_args.h>
#include <attnpack/ops/kv_cache.h>

// The arguments of attend after query, key, value, in the schema's order.
#define ATTNPACK_ATTEND_PARAMS                                                                                 \
  std::optional<at::ArrayRef<double>> rope_inv_freq, double rope_factor, bool rope_interleaved,                \
      const std::optional<Tensor>&positions, bool cross, const std::optional<Tensor>&cache_key,                \
      const std::optional<Tensor>&cache_value, const std::optional<Tensor>&cache_lengths,                      \
      const std::optional<Tensor>&mask, bool causal, const std::optional<Tensor>&kv_lens, int64_t window_left, \
      int64_t window_right, double softcap, const std::optional<Tensor>&sinks,                                 \
      const std::optional<Tensor>&alibi_slopes, at::OptionalIntArrayRef head_map, double dropout_p,            \
      std::optional<double> scale, std::optional<at::ArrayRef<double>> rope_long_inv_freq, double rope_growth, \
      int64_t rope_trained_len, bool rope_raw_keys

#define ATTNPACK_ATTEND_ARGS                                                                                           \
  rope_inv_freq, rope_factor, rope_interleaved, positions, cross, cache_key, cache_value, cache_lengths, mask, causal, \
      kv_lens, window_left, window_right, softcap, sinks, alibi_slopes, head_map, dropout_p, scale,                    \
      rope_long_inv_freq, rope_growth, rope_trained_len, rope_raw_keys

#define ATTNPACK_ATTEND_SCHEMA                                                                                    \
  "(Tensor query, Tensor key, Tensor value, float[]? rope_inv_freq, float rope_factor, bool rope_interleaved, "   \
  "Tensor? positions, bool cross, Tensor(a!)? cache_key, Tensor(b!)? cache_value, Tensor(c!)? cache_lengths, "    \
  "Tensor? mask, bool causal, Tensor? kv_lens, int window_left, int window_right, float softcap, Tensor? sinks, " \
  "Tensor? alibi_slopes, int[]? head_map, float dropout_p, float? scale, "                                        \
  "float[]? rope_long_inv_freq=None, float rope_growth=0.0, int rope_trained_len=1, bool rope_raw_keys=False)"

namespace attnpack {
namespace {

#define ATTNPACK_ROPE_SETTINGS                                                                                         \
  parse_rope_settings(rope_inv_freq, rope_factor, rope_interleaved, rope_long_inv_freq, rope_growth, rope_trained_len, \
                      rope_raw_keys)

struct Layer {
  Tensor query, key, value;  // as they enter the operator
  std::optional<Tensor> q_offsets, kv_lens;
};

// Whether the cache may rotate what it takes: plain numbers on the CPU without gradients, each token behind the last.
bool rotates_in_cache(const RopeSettings& rope, const std::optional<Tensor>& positions, const Tensor& query,
                      const Tensor& key, const Tensor& value) {
  return query.is_cpu() && !at::GradMode::is_enabled() && !positions && !rope.by_length() && !rope.raw_keys &&
         !at::areAnyTensorSubclassLike({query, key, value}) && !query._fw_grad(/*level=*/0).defined();
}

// Rotates, and appends to the cache where there is one. Everything is checked before the cache is written.
Layer prepare(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTEND_PARAMS) {
  check_dropout(dropout_p);
  const auto check = [&](const Tensor& k, const Tensor& v, const std::optional<Tensor>& lens) {
    check_attention(query, k, v, mask, causal, 0, std::nullopt, window_left, window_right, lens, softcap, sinks,
                    alibi_slopes, head_map, 0.0, std::nullopt, scale);
  };
  const std::optional<RopeSettings> rope = ATTNPACK_ROPE_SETTINGS;
  if (!cache_key) {
    check(key, value, kv_lens);
    if (!rope) return {query, key, value, std::nullopt, kv_lens};
    auto [q, k] = rotate_new(query, key, *rope, {positions, cross, std::nullopt, kv_lens});
    return {q, k, value, std::nullopt, kv_lens};
  }
  ATTNPACK_CHECK(!cross, "cache is given together with a context: a cache holds the keys of self-attention");
  ATTNPACK_CHECK(cache_value && cache_lengths, "cache has no value or no lengths: pass all three of its tensors");
  check_kv_cache_append(*cache_key, *cache_value, *cache_lengths, key, value, kv_lens);
  const CacheTensors cache{*cache_key, *cache_value, *cache_lengths};
  Room room = room_under(cache, mask);
  check(room.key, room.value, std::nullopt);
  const Tensor past = cache_lengths->clone();
  if (rope && rotates_in_cache(*rope, positions, query, key, value)) {
    const Tensor q = kv_cache_append_rotated_(*cache_key, *cache_value, *cache_lengths, query, key, value,
                                              rope->inv_freq, rope->factor, rope->interleaved, kv_lens, room.limit);
    return {q, room.key, room.value, past, *cache_lengths};
  }
  Tensor q = query, k = key;
  if (rope) std::tie(q, k) = rotate_new(query, key, *rope, {positions, false, past, kv_lens});
  room = append(cache, room, k, value, past, kv_lens);
  const Tensor lengths = cache_lengths->clone();
  return {q, rope ? rotate_cached(room.key, lengths, *rope) : room.key, room.value, past, lengths};
}

Tensor join_heads(const Tensor& out) { return out.transpose(1, 2).flatten(2); }

// The operator's arguments after the mask, as attend has them.
#define ATTNPACK_FROM_LAYER(layer, seed)                                                                              \
  mask, causal, 0, layer.q_offsets, window_left, window_right, layer.kv_lens, softcap, sinks, alibi_slopes, head_map, \
      dropout_p, seed, scale

Tensor run(const Layer& layer, ATTNPACK_ATTEND_PARAMS) {
  const auto seed = dropout_seed(dropout_p);
  return join_heads(std::get<0>(attention_op(layer.query, layer.key, layer.value, ATTNPACK_FROM_LAYER(layer, seed))));
}

Tensor attend_composite(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTEND_PARAMS) {
  return run(prepare(query, key, value, ATTNPACK_ATTEND_ARGS), ATTNPACK_ATTEND_ARGS);
}

std::tuple<Tensor, Tensor> attend_with_weights_composite(const Tensor& query, const Tensor& key, const Tensor& value,
                                                         ATTNPACK_ATTEND_PARAMS) {
  Layer layer = prepare(query, key, value, ATTNPACK_ATTEND_ARGS);
  // As many columns as the longest sequence has keys; all that there is room for where tracing knows no values.
  if (cache_key && !mask && !at::isTensorSubclassLike(*layer.kv_lens) && layer.kv_lens->numel() > 0) {
    const int64_t longest = layer.kv_lens->max().item<int64_t>();
    layer.key = layer.key.narrow(2, 0, longest);
    layer.value = layer.value.narrow(2, 0, longest);
  }
  const Tensor out = run(layer, ATTNPACK_ATTEND_ARGS);
  const std::optional<Tensor> no_seed;
  return {out, scores_formula(layer.query, layer.key, mask, causal, 0, layer.q_offsets, window_left, window_right,
                              layer.kv_lens, softcap, sinks, alibi_slopes, head_map, 0.0, no_seed, scale, "probs")};
}

template <class Result>
Result call(const char* name, const Tensor& query, const Tensor& key, const Tensor& value, const AttendOptions& o) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(name, "")
                             .typed<Result(const Tensor&, const Tensor&, const Tensor&, ATTNPACK_ATTEND_PARAMS)>();
  std::optional<at::ArrayRef<double>> inv_freq, long_inv_freq;
  if (o.rope()) inv_freq = o.rope()->inv_freq;
  if (o.rope() && !o.rope()->long_inv_freq.empty()) long_inv_freq = o.rope()->long_inv_freq;
  at::OptionalIntArrayRef head_map;
  if (o.head_map()) head_map = *o.head_map();
  std::optional<Tensor> cache_key, cache_value, cache_lengths;
  if (o.cache()) {
    cache_key = o.cache()->key;
    cache_value = o.cache()->value;
    cache_lengths = o.cache()->lengths;
  }
  return op.call(query, key, value, inv_freq, o.rope() ? o.rope()->factor : 1.0, o.rope() && o.rope()->interleaved,
                 o.positions(), o.cross(), cache_key, cache_value, cache_lengths, o.mask(), o.causal(), o.kv_lens(),
                 o.window()[0], o.window()[1], o.softcap(), o.sinks(), o.alibi_slopes(), head_map, o.dropout_p(),
                 o.scale(), long_inv_freq, o.rope() ? o.rope()->growth : 0.0, o.rope() ? o.rope()->trained_len : 1,
                 o.rope() && o.rope()->raw_keys);
}

}  // namespace

Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const AttendOptions& options) {
  return call<Tensor>("attnpack::attend", query, key, value, options);
}

std::tuple<Tensor, Tensor> attend_with_weights(const Tensor& query, const Tensor& key, const Tensor& value,
                                               const AttendOptions& options) {
  return call<std::tuple<Tensor, Tensor>>("attnpack::attend_with_weights", query, key, value, options);
}

std::tuple<Tensor, Tensor> rotate(const Tensor& query, const Tensor& key, const AttendOptions& o) {
  if (!o.rope()) return {query, key};
  return rotate_new(query, key, *o.rope(), {o.positions(), o.cross(), std::nullopt, o.kv_lens()});
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("attend" ATTNPACK_ATTEND_SCHEMA " -> Tensor", &attnpack::attend_composite);
  m.def("attend_with_weights" ATTNPACK_ATTEND_SCHEMA " -> (Tensor, Tensor)", &attnpack::attend_with_weights_composite);
}

namespace attnpack {
namespace {

void register_parts(torch::Library& m) {
  m.impl("attend", &attend_composite);
  m.impl("attend_with_weights", &attend_with_weights_composite);
}

}  // namespace
}  // namespace attnpack

// The schema names the cache's tensors as written, for which vmap has no rule; without a cache nothing is. For lazy
// tensors torch has one that breaks what is written (ops/lazy).
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) { attnpack::register_parts(m); }
TORCH_LIBRARY_IMPL(attnpack, Negative, m) { attnpack::register_parts(m); }
TORCH_LIBRARY_IMPL(attnpack, Conjugate, m) { attnpack::register_parts(m); }
