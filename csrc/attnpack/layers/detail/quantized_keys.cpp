#include <attnpack/layers/detail/quantized_keys.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <vector>

#include <attnpack/core/check.h>
#include <attnpack/layers/detail/dropped_keys.h>
#include <attnpack/layers/detail/mask_columns.h>
#include <attnpack/layers/detail/place_tokens.h>
#include <attnpack/ops/attention.h>
#include <attnpack/ops/detail/attention_quantized.h>
#include <attnpack/ops/merge_states.h>
#include <attnpack/ops/quantize.h>

namespace attnpack {
namespace {

using c10::SymInt;

// Keys that one call of the operator reads. Each key is in one part.
struct Part {
  Tensor key, value;
  int64_t bits;       // 0: numbers as they are
  SymInt v_head_dim;  // of quantised values
  AttentionArguments args;
  int64_t shift;     // the queries stand so many positions before their places
  Tensor positions;  // [1 or B, keys] of the keys; for weights
};

// The keys and values as the parts read them, after the append.
struct Stored {
  Tensor key, value;
  int64_t bits;
  Tensor exact_key, exact_value;  // undefined: there are none
  Tensor past, lengths;           // [B], positions before and after the append
};

// The slots of exact positions, as a cache of its own.
CacheTensors exact_slots(const CacheTensors& cache) {
  return {*cache.exact_key, *cache.exact_value, cache.lengths, cache.dropped, cache.window, cache.keep_first};
}

// With e = exact_last = cache.window + 1 and f = exact_first, the query at p reads
//   the last part, p - e < j <= p, from the slots: a window (e - 1, 0),
//   the first part, j < f and j <= p - e, from the slots: causality for a query at p - e,
//   the quantised rows, f <= j <= p - e: the same.
// A window (left, 0) of the layer is a window (left - e, 0) of the query at p - e.
std::vector<Part> parts_of(const Stored& stored, const CacheTensors& cache, const AttentionArguments& args,
                           const SymInt& v_head_dim) {
  const int64_t shift = cache.exact_key ? cache.window + 1 : 0;
  const SymInt capacity = stored.key.sym_size(2);
  const SymInt keep = cache.exact_key ? SymInt(cache.keep_first).min(capacity) : SymInt(0);
  const SymInt readable = covers_positions(args.mask) ? args.mask->sym_size(-1).min(capacity) : capacity;
  const Tensor all = at::arange(capacity, stored.lengths.options()).unsqueeze(0);
  std::vector<Part> parts;
  const auto add = [&](const Tensor& key, const Tensor& value, int64_t bits, AttentionArguments part, int64_t behind,
                       const Tensor& positions) {
    if (!parts.empty()) part.sinks = std::nullopt;  // they join the sum once
    parts.push_back({key, value, bits, v_head_dim, std::move(part), behind, positions});
  };

  if (cache.exact_key && shift > 0) {
    const CacheTensors slots = exact_slots(cache);
    AttentionArguments last = args;
    if (covers_positions(args.mask)) last.mask = mask_of_slots(*args.mask, slots);
    last.q_offsets = stored.past - *cache.dropped;
    last.kv_lens = stored.lengths - *cache.dropped;
    last.window[0] = args.window[0] < 0 ? shift - 1 : std::min(args.window[0], shift - 1);
    add(stored.exact_key, stored.exact_value, 0, std::move(last), 0, positions_of_slots(slots));
  }
  AttentionArguments before = args;  // of the queries at p - e
  before.window[0] = args.window[0] < 0 ? -1 : args.window[0] - shift;
  if (args.window[0] >= 0 && before.window[0] < 0) return parts;
  if (keep > 0) {
    AttentionArguments first = before;
    const SymInt count = keep.min(readable);
    first.mask = mask_from(args.mask, 0, count);
    first.q_offsets = stored.past - shift;
    first.kv_lens = stored.lengths.clamp_max(keep);
    add(stored.exact_key.narrow_symint(2, 0, count), stored.exact_value.narrow_symint(2, 0, count), 0, std::move(first),
        shift, all.narrow_symint(1, 0, count));
  }
  if (parts.empty() || keep < readable) {  // an empty cache has one empty part
    AttentionArguments rows = before;
    const SymInt count = readable - keep;
    rows.mask = mask_from(args.mask, keep, count);
    rows.q_offsets = stored.past - shift - keep;
    rows.kv_lens = (stored.lengths - keep).clamp_min(0);
    add(stored.key.narrow_symint(2, keep, count), stored.value.narrow_symint(2, keep, count), stored.bits,
        std::move(rows), shift, all.narrow_symint(1, keep, count));
  }
  return parts;
}

AttentionResult attend_part(const Tensor& query, const Part& part) {
  auto [out, lse] = part.bits ? attention_quantized(query, part.key, part.value, part.bits, part.v_head_dim, part.args)
                              : attention_op(query, part.key, part.value, part.args);
  // ALiBi has lowered each score by slope * shift too little.
  if (part.args.alibi_slopes && part.shift > 0)
    lse = lse - (part.args.alibi_slopes->to(lse.scalar_type()) * part.shift).view({-1, 1});
  return {out, lse};
}

AttentionResult attend_parts(const Tensor& query, const std::vector<Part>& parts) {
  AttentionResult sum = attend_part(query, parts.front());
  for (size_t i = 1; i < parts.size(); ++i) {
    const auto [out, lse] = attend_part(query, parts[i]);
    sum = merge_states(std::get<0>(sum), std::get<1>(sum), out, lse);
  }
  return sum;
}

// The probabilities over `keys` positions: those of each part, by its share of the sum.
Tensor probabilities(const Tensor& query, std::vector<Part> parts, const SymInt& keys) {
  for (Part& part : parts) {
    part.args.dropout_p = 0;
    part.args.dropout_seed = std::nullopt;
  }
  const Tensor lse = std::get<1>(attend_parts(query, parts));
  Tensor sum;
  for (const Part& part : parts) {
    const auto dtype = query.scalar_type();
    const Tensor key = part.bits ? dequantize_rows(part.key, part.bits, query.sym_size(3), dtype) : part.key;
    const Tensor share = (std::get<1>(attend_part(query, part)) - lse).exp().nan_to_num(0).unsqueeze(-1).to(dtype);
    const Tensor weights = scores_formula(query, key, part.args, "probs") * share;
    // Slots without a position have no weight.
    const Tensor index =
        part.positions.clamp_max(keys - 1).unsqueeze(1).unsqueeze(1).expand_symint(weights.sym_sizes());
    const Tensor zeros =
        at::zeros_symint({weights.sym_size(0), weights.sym_size(1), weights.sym_size(2), keys}, weights.options());
    const Tensor placed = zeros.scatter_add(3, index, weights);
    sum = sum.defined() ? sum + placed : placed;
  }
  return sum;
}

void check_layer(const CacheTensors& cache, const LayerArguments& layer, const AttentionArguments& args,
                 const std::optional<RopeSettings>& rope) {
  ATTNPACK_CHECK(!layer.cross, "cache is given together with a context: a cache holds the keys of self-attention");
  ATTNPACK_CHECK(!rope || !rope->raw_keys,
                 "cache: got a QuantizedCache for RoPE that rotates all stored keys at each call, want one that stores "
                 "them as they are; use a DynamicCache or StaticCache");
  ATTNPACK_CHECK(!cache.exact_key || (args.causal && args.window[1] <= 0),
                 "cache: got a QuantizedCache with exact_first = ", cache.keep_first,
                 " and exact_last = ", cache.window + 1, " for attention with window (", args.window[0], ", ",
                 args.window[1], ") and causal = ", args.causal ? "true" : "false",
                 ", want causal attention; leave both out, or use a DynamicCache");
}

}  // namespace

std::tuple<Tensor, Tensor> attend_quantized(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const CacheTensors& cache, const LayerArguments& layer,
                                            const ScoreRules& rules, bool need_weights) {
  const auto rope = rope_settings(layer.rope);
  AttentionArguments args = attention_arguments(layer, rules);
  args.kv_lens = std::nullopt;
  check_layer(cache, layer, args, rope);
  const Tensor past = copy_lengths(cache.lengths);
  if (args.chunk && cache.exact_key) {  // its parts count positions from elsewhere
    const SymInt columns = covers_positions(args.mask) ? args.mask->sym_size(-1) : cache.key.sym_size(2);
    args = with_chunks_masked(std::move(args), new_positions(past, query.sym_size(2)),
                              at::arange(columns, past.options()));
  }
  const auto [q, k] = rotate_tokens({query, key, value}, rope, {layer.positions, false, past, layer.kv_lens});
  const SymInt dim = k.sym_size(3), v_head_dim = value.sym_size(3);
  const Tensor key_rows = quantize_rows(k.detach(), cache.bits), value_rows = quantize_rows(value.detach(), cache.bits);

  // Nothing is written before everything is checked.
  check_kv_cache_append(cache.key, cache.value, cache.lengths, key_rows, value_rows, layer.kv_lens);
  if (cache.exact_key)
    check_kv_cache_append(*cache.exact_key, *cache.exact_value, cache.lengths, k, value, layer.kv_lens, cache.dropped);
  std::optional<SymInt> limit;
  SymInt readable = cache.key.sym_size(2);
  if (covers_positions(args.mask) && args.mask->sym_size(-1) < readable) readable = *(limit = args.mask->sym_size(-1));
  check_attention_quantized(q, cache.key.narrow_symint(2, 0, readable), cache.value.narrow_symint(2, 0, readable),
                            cache.bits, v_head_dim, args);

  kv_cache_append_(cache.key, cache.value, cache.lengths, key_rows, value_rows, layer.kv_lens, limit);
  if (cache.exact_key)
    kv_cache_append_(*cache.exact_key, *cache.exact_value, copy_lengths(past), k.detach(), value.detach(),
                     layer.kv_lens, std::nullopt, cache.dropped);
  Stored stored{cache.key, cache.value, cache.bits, {}, {}, past, copy_lengths(cache.lengths)};
  if (cache.exact_key) {
    stored.exact_key = *cache.exact_key;
    stored.exact_value = *cache.exact_value;
  }
  if (at::GradMode::is_enabled() && (k.requires_grad() || value.requires_grad())) {
    const auto with_gradients = [&](const Tensor& rows, const Tensor& new_rows, const Tensor& x) {
      const auto expand = [&](const Tensor& r) {
        return dequantize_rows(r, cache.bits, x.sym_size(3), x.scalar_type());
      };
      return with_new_rows(expand(rows), as_if_exact(x, expand(new_rows)), past, layer.kv_lens);
    };
    stored.key = with_gradients(cache.key, key_rows, k);
    stored.value = with_gradients(cache.value, value_rows, value);
    stored.bits = 0;
    if (cache.exact_key) {
      stored.exact_key = with_new_rows(*cache.exact_key, k, past - *cache.dropped, layer.kv_lens);
      stored.exact_value = with_new_rows(*cache.exact_value, value, past - *cache.dropped, layer.kv_lens);
    }
  }
  args.dropout_p = rules.dropout_p;
  args.dropout_seed = dropout_seed(rules.dropout_p, q.device());
  const auto parts = parts_of(stored, cache, args, v_head_dim);
  const Tensor weights = need_weights ? probabilities(q, parts, readable) : Tensor();
  return {std::get<0>(attend_parts(q, parts)), weights};
}

}  // namespace attnpack
