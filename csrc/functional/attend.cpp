#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/functional/attend.h>
#include <attnpack/ops/attention_args.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/rope.h>

// The arguments of attend after query, key, value, in the schema's order.
#define ATTNPACK_ATTEND_PARAMS                                                                                 \
  std::optional<at::ArrayRef<double>> rope_inv_freq, double rope_factor, bool rope_interleaved,                \
      const std::optional<Tensor>&positions, bool cross, const std::optional<Tensor>&cache_key,                \
      const std::optional<Tensor>&cache_value, const std::optional<Tensor>&cache_lengths,                      \
      const std::optional<Tensor>&mask, bool causal, const std::optional<Tensor>&kv_lens, int64_t window_left, \
      int64_t window_right, double softcap, const std::optional<Tensor>&sinks,                                 \
      const std::optional<Tensor>&alibi_slopes, at::OptionalIntArrayRef head_map, double dropout_p,            \
      std::optional<double> scale

#define ATTNPACK_ATTEND_ARGS                                                                                           \
  rope_inv_freq, rope_factor, rope_interleaved, positions, cross, cache_key, cache_value, cache_lengths, mask, causal, \
      kv_lens, window_left, window_right, softcap, sinks, alibi_slopes, head_map, dropout_p, scale

#define ATTNPACK_ATTEND_SCHEMA                                                                                    \
  "(Tensor query, Tensor key, Tensor value, float[]? rope_inv_freq, float rope_factor, bool rope_interleaved, "   \
  "Tensor? positions, bool cross, Tensor(a!)? cache_key, Tensor(b!)? cache_value, Tensor(c!)? cache_lengths, "    \
  "Tensor? mask, bool causal, Tensor? kv_lens, int window_left, int window_right, float softcap, Tensor? sinks, " \
  "Tensor? alibi_slopes, int[]? head_map, float dropout_p, float? scale)"

namespace attnpack {
namespace {

struct Rotated {
  Tensor query, key;
};

Rotated rotate_both(const Tensor& query, const Tensor& key, std::optional<at::ArrayRef<double>> inv_freq, double factor,
                    bool interleaved, const std::optional<Tensor>& positions, bool cross,
                    const std::optional<Tensor>& past) {
  if (!inv_freq) return {query, key};
  const auto options = at::TensorOptions(at::kLong).device(query.device());
  const auto count = [&](const Tensor& x) { return at::arange(x.sym_size(2), options); };
  const auto table = [&](const Tensor& where) {
    auto [cos, sin] = rope_table(where, *inv_freq, factor);  // [L, r/2] or [B, L, r/2]
    if (where.dim() == 2) {
      cos = cos.unsqueeze(1);
      sin = sin.unsqueeze(1);
    }
    return std::make_pair(cos, sin);
  };
  if (positions) {
    ATTNPACK_CHECK(
        positions->scalar_type() == at::kLong &&
            (positions->dim() == 1 ||
             (positions->dim() == 2 && (positions->sym_size(0) == query.sym_size(0) || positions->sym_size(0) == 1))) &&
            positions->sym_size(-1) == query.sym_size(2),
        "positions has shape ", positions->sym_sizes(), " and dtype ", positions->scalar_type(),
        ", wants int64 [length] or [batch, length] with length ", query.sym_size(2));
  }
  const Tensor where = positions ? *positions : past ? past->unsqueeze(-1) + count(query) : count(query);
  const auto [cos, sin] = table(where);
  const Tensor rotated = apply_rope(query, cos, sin, interleaved);
  if (!cross) return {rotated, apply_rope(key, cos, sin, interleaved)};
  const auto [key_cos, key_sin] = table(count(key));
  return {rotated, apply_rope(key, key_cos, key_sin, interleaved)};
}

// A copy of the cache that is differentiable in its new rows, and only in them: [B, Hkv, capacity, D].
Tensor with_new_rows(const Tensor& cache,
                     const Tensor& rows,                       // [B, Hkv, L, D]
                     const Tensor& past,                       // [B], lengths before the append
                     const std::optional<Tensor>& new_lens) {  // [B]
  const c10::SymInt capacity = cache.sym_size(2);
  const Tensor step = at::arange(rows.sym_size(2), past.options());
  Tensor target = past.unsqueeze(-1) + step;  // [B, L]
  // Rows that are not valid go to slots behind the end, which are cut off again.
  if (new_lens) target = at::where(step < new_lens->to(at::kLong).unsqueeze(-1), target, step + capacity);
  const Tensor room = at::constant_pad_nd_symint(cache.detach(), {0, 0, 0, rows.sym_size(2)});
  const Tensor index = target.unsqueeze(1).unsqueeze(-1).expand_symint(rows.sym_sizes());
  return room.scatter(2, index, rows).narrow_symint(2, 0, capacity);
}

struct Layer {
  Tensor query, key, value;  // as they enter the operator
  std::optional<Tensor> q_offsets, kv_lens;
};

// Rotates, and appends to the cache where there is one. Everything is checked before the cache is written.
Layer prepare(const Tensor& query, const Tensor& key, const Tensor& value, ATTNPACK_ATTEND_PARAMS) {
  const auto check = [&](const Tensor& k, const Tensor& v, const std::optional<Tensor>& lens) {
    check_attention(query, k, v, mask, causal, 0, std::nullopt, window_left, window_right, lens, softcap, sinks,
                    alibi_slopes, head_map, 0.0, std::nullopt, scale);
  };
  if (!cache_key) {
    check(key, value, kv_lens);
    auto [q, k] = rotate_both(query, key, rope_inv_freq, rope_factor, rope_interleaved, positions, cross, std::nullopt);
    return {q, k, value, std::nullopt, kv_lens};
  }
  ATTNPACK_CHECK(!cross, "cache is given together with a context: a cache holds the keys of self-attention");
  ATTNPACK_CHECK(cache_value && cache_lengths, "cache has no value or no lengths: pass all three of its tensors");
  check_kv_cache_append(*cache_key, *cache_value, *cache_lengths, key, value, kv_lens);
  // A mask over fewer positions than the cache has room for says which may be read.
  Tensor keys = *cache_key, values = *cache_value;
  std::optional<c10::SymInt> limit;
  if (mask && mask->dim() > 0 && mask->sym_size(-1) != 1 && mask->sym_size(-1) < keys.sym_size(2))
    limit = mask->sym_size(-1);
  if (limit) {
    keys = keys.narrow_symint(2, 0, *limit);
    values = values.narrow_symint(2, 0, *limit);
  }
  check(keys, values, std::nullopt);
  const Tensor past = cache_lengths->clone();
  auto [q, k] = rotate_both(query, key, rope_inv_freq, rope_factor, rope_interleaved, positions, false, past);
  kv_cache_append_(*cache_key, *cache_value, *cache_lengths, k, value, kv_lens, limit);
  if (at::GradMode::is_enabled() && (k.requires_grad() || value.requires_grad())) {
    keys = with_new_rows(keys, k, past, kv_lens);
    values = with_new_rows(values, value, past, kv_lens);
  }
  return {q, keys, values, past, cache_lengths->clone()};
}

Tensor join_heads(const Tensor& out) { return out.transpose(1, 2).flatten(2); }

// The operator's arguments after the mask, as attend has them.
#define ATTNPACK_FROM_LAYER(layer, seed)                                                                              \
  mask, causal, 0, layer.q_offsets, window_left, window_right, layer.kv_lens, softcap, sinks, alibi_slopes, head_map, \
      dropout_p, seed, scale

Tensor run(const Layer& layer, ATTNPACK_ATTEND_PARAMS) {
  std::optional<Tensor> seed;
  if (dropout_p > 0) seed = at::randint(std::numeric_limits<int64_t>::max(), {1}, at::kLong);
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
  std::optional<at::ArrayRef<double>> inv_freq;
  if (o.rope()) inv_freq = o.rope()->inv_freq;
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
                 o.scale());
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
  std::optional<at::ArrayRef<double>> inv_freq;
  if (o.rope()) inv_freq = o.rope()->inv_freq;
  const std::optional<Tensor> past = o.cache() ? std::make_optional(o.cache()->lengths) : std::nullopt;
  auto [q, k] = rotate_both(query, key, inv_freq, o.rope() ? o.rope()->factor : 1.0, o.rope() && o.rope()->interleaved,
                            o.positions(), o.cross(), past);
  return {q, k};
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def("attend" ATTNPACK_ATTEND_SCHEMA " -> Tensor", &attnpack::attend_composite);
  m.def("attend_with_weights" ATTNPACK_ATTEND_SCHEMA " -> (Tensor, Tensor)", &attnpack::attend_with_weights_composite);
}

// The schema names the cache's tensors as written, for which vmap has no rule; without a cache nothing is.
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) {
  m.impl("attend", &attnpack::attend_composite);
  m.impl("attend_with_weights", &attnpack::attend_with_weights_composite);
}
