#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <attnpack/core/check.h>
#include <attnpack/layers/detail/latent_algebra.h>
#include <attnpack/layers/latent_attend.h>
#include <attnpack/ops/detail/attention_args.h>
#include <attnpack/ops/kv_cache.h>
#include <attnpack/ops/linear.h>

// The arguments of the latent ops that say where the tokens stand, in the schema's order.
#define ATTNPACK_LATENT_PARAMS                                                                              \
  std::optional<at::ArrayRef<double>> rope_inv_freq, double rope_factor, bool rope_interleaved,             \
      std::optional<at::ArrayRef<double>> rope_long_inv_freq, double rope_growth, int64_t rope_trained_len, \
      bool rope_raw_keys, const std::optional<Tensor>&positions, bool cross,                                \
      const std::optional<Tensor>&cache_latents, const std::optional<Tensor>&cache_lengths,                 \
      const std::optional<Tensor>&mask, bool causal, const std::optional<Tensor>&kv_lens, double dropout_p, \
      std::optional<double> scale

#define ATTNPACK_LATENT_ARGS                                                                                      \
  rope_inv_freq, rope_factor, rope_interleaved, rope_long_inv_freq, rope_growth, rope_trained_len, rope_raw_keys, \
      positions, cross, cache_latents, cache_lengths, mask, causal, kv_lens, dropout_p, scale

#define ATTNPACK_LATENT_SCHEMA                                                                                        \
  "float[]? rope_inv_freq, float rope_factor, bool rope_interleaved, float[]? rope_long_inv_freq, float "             \
  "rope_growth, int rope_trained_len, bool rope_raw_keys, Tensor? positions, bool cross, Tensor(a!)? cache_latents, " \
  "Tensor(b!)? cache_lengths, Tensor? mask, bool causal, Tensor? kv_lens, float dropout_p, float? scale)"

namespace attnpack {
namespace {

using c10::SymInt;

struct Layer {
  Tensor query, latents;  // rotated: [B, H, L, N + R], [B, 1, K, C + R]
  std::optional<Tensor> q_offsets, kv_lens;
  SymInt latent_dim, rotated_dim;
  bool cached = false;

  Tensor latent() const { return latents.narrow_symint(3, 0, latent_dim); }
  Tensor nope() const { return query.narrow_symint(3, 0, query.sym_size(3) - rotated_dim); }
  Tensor rotated() const { return query.narrow_symint(3, query.sym_size(3) - rotated_dim, rotated_dim); }
};

// Latents as keys or values of that width, for checks: nothing is computed or read.
Tensor as_wide(const Tensor& latents, const SymInt& width) {
  auto shape = latents.sym_sizes().vec();
  shape.back() = width;
  return latents.narrow_symint(3, 0, 1).expand_symint(shape);
}

void check_latents(const Tensor& query, const Tensor& latent, const Tensor& k_rope) {
  ATTNPACK_CHECK(query.dim() == 4, "query has shape ", query.sym_sizes(),
                 ", wants [batch, num_heads, length, head_dim]");
  ATTNPACK_CHECK(latent.dim() == 3 && latent.sym_size(2) > 0, "latent has shape ", latent.sym_sizes(),
                 ", wants [batch, length, kv_lora_rank]");
  ATTNPACK_CHECK(k_rope.dim() == 3 && k_rope.sym_size(0) == latent.sym_size(0) &&
                     k_rope.sym_size(1) == latent.sym_size(1) && k_rope.sym_size(2) <= query.sym_size(3),
                 "k_rope has shape ", k_rope.sym_sizes(), ", wants [batch, length, qk_rope_head_dim] beside latent ",
                 latent.sym_sizes(), " and query ", query.sym_sizes());
}

// What leads from latents to heads.
void check_up(const Tensor& query, const Tensor& latent, const Tensor& k_rope, const std::optional<Tensor>& kv_b,
              const SymInt& v_dim, c10::string_view path) {
  check_latents(query, latent, k_rope);
  ATTNPACK_CHECK(path == "auto" || path == "expanded" || path == "absorbed", "path: got '", path,
                 "', want 'auto', 'expanded' or 'absorbed'");
  const SymInt width = query.sym_size(3), rotated = k_rope.sym_size(2), latent_dim = latent.sym_size(2);
  if (!kv_b) {
    ATTNPACK_CHECK(width == latent_dim + rotated, "query has head_dim ", width, " without kv_b, wants ", latent_dim,
                   " + ", rotated, ", the width of latent and k_rope");
    return;
  }
  const SymInt rows = query.sym_size(1) * (width - rotated + v_dim);
  ATTNPACK_CHECK(v_dim >= 0 && kv_b->dim() == 2 && kv_b->sym_size(0) == rows && kv_b->sym_size(1) == latent_dim,
                 "kv_b has shape ", kv_b->sym_sizes(), " for v_dim ", v_dim,
                 ", wants [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank] = [", rows, ", ", latent_dim,
                 "]");
}

// query with its last dims, and k_rope, at their places.
std::tuple<Tensor, Tensor> rotate_parts(const Tensor& query, const Tensor& k_rope,
                                        const std::optional<RopeSettings>& rope, const Placement& place) {
  const Tensor key = k_rope.unsqueeze(1);  // [B, 1, L, R]
  const SymInt rotated = key.sym_size(3), nope = query.sym_size(3) - rotated;
  if (!rope || rotated == 0) return {query, key};
  const auto [q, k] = rotate_new(query.narrow_symint(3, nope, rotated), key, *rope, place);
  return {at::cat({query.narrow_symint(3, 0, nope), q}, -1), k};
}

// Rotates, and appends to the cache where there is one. Everything is checked before the cache is written.
Layer prepare(const Tensor& query, const Tensor& latent, const Tensor& k_rope, ATTNPACK_LATENT_PARAMS) {
  check_latents(query, latent, k_rope);
  check_dropout(dropout_p);
  const auto rope = parse_rope_settings(rope_inv_freq, rope_factor, rope_interleaved, rope_long_inv_freq, rope_growth,
                                        rope_trained_len, rope_raw_keys);
  const auto check = [&](const Tensor& keys, const std::optional<Tensor>& lens) {
    const Tensor like = as_wide(keys, query.sym_size(3));
    check_attention(query, like, like, mask, causal, 0, std::nullopt, -1, -1, lens, 0.0, std::nullopt, std::nullopt,
                    std::nullopt, 0.0, std::nullopt, scale);
  };
  // Autocast may have made the norm's output wider than the projections'.
  const auto join = [&](const Tensor& k) {
    return at::cat({latent.unsqueeze(1).to(query.scalar_type()), k.to(query.scalar_type())}, -1);
  };
  Layer layer;
  layer.latent_dim = latent.sym_size(2);
  layer.rotated_dim = k_rope.sym_size(2);
  if (!cache_latents) {
    check(latent.unsqueeze(1).to(query.scalar_type()), kv_lens);
    const auto [q, k] = rotate_parts(query, k_rope, rope, {positions, cross, std::nullopt, kv_lens});
    layer.query = q;
    layer.latents = join(k);
    layer.kv_lens = kv_lens;
    return layer;
  }
  ATTNPACK_CHECK(!cross, "cache is given together with a context: a cache holds the latents of self-attention");
  ATTNPACK_CHECK(cache_lengths, "cache has no lengths: pass both of its tensors");
  // The op takes keys and values; latents are both, and are stored once.
  const auto nothing = [](const Tensor& x) {
    return at::empty_symint({x.sym_size(0), x.sym_size(1), x.sym_size(2), 0}, x.options());
  };
  const CacheTensors cache{*cache_latents, nothing(*cache_latents), *cache_lengths};
  const Tensor unrotated = join(k_rope.unsqueeze(1));
  check_kv_cache_append(cache.key, cache.value, cache.lengths, unrotated, nothing(unrotated), kv_lens);
  const Room room = room_under(cache, mask);
  check(room.key, std::nullopt);
  const Tensor past = cache.lengths.clone();
  const auto [q, k] = rotate_parts(query, k_rope, rope, {positions, false, past, kv_lens});
  const Tensor fresh = join(k);
  layer.latents = append(cache, room, fresh, nothing(fresh), past, kv_lens).key;
  layer.query = q;
  layer.q_offsets = past;
  layer.kv_lens = cache.lengths.clone();
  layer.cached = true;
  if (rope && rope->raw_keys && layer.rotated_dim > 0) {
    const Tensor raw = layer.latents.narrow_symint(3, layer.latent_dim, layer.rotated_dim);
    layer.latents = at::cat({layer.latent(), rotate_cached(raw, *layer.kv_lens, *rope)}, -1);
  }
  return layer;
}

// As the operator takes them; absorbed outputs are still latents.
struct Heads {
  Tensor query, key, value;
  bool absorbed;
};

// What lies beyond kv_lens must not meet a zero gradient: 0 * NaN is no zero.
Tensor only_valid(const Tensor& latent, const std::optional<Tensor>& kv_lens) {  // [B, K, C]
  const Tensor slots = at::arange(latent.sym_size(1), kv_lens->options().dtype(at::kLong));
  const Tensor beyond = slots.ge(kv_lens->unsqueeze(1));  // [B, K]
  return latent.masked_fill(beyond.unsqueeze(-1), 0);
}

Heads make_heads(const Layer& layer, const std::optional<Tensor>& kv_b, const SymInt& v_dim, c10::string_view path) {
  if (!kv_b) return {layer.query, layer.latents, layer.latent(), true};
  const SymInt heads = layer.query.sym_size(1), nope = layer.query.sym_size(3) - layer.rotated_dim;
  if (path == "absorbed" || (path == "auto" && absorbed_is_cheaper(layer.query.sym_size(2), layer.latents.sym_size(2),
                                                                   nope, v_dim, layer.latent_dim))) {
    const Tensor folded = fold_query(layer.nope(), *kv_b);
    const Tensor query = layer.rotated_dim == 0 ? folded : at::cat({folded, layer.rotated()}, -1);
    return {query, layer.latents, layer.latent(), true};
  }
  Tensor latent = layer.latent().squeeze(1);
  if (layer.kv_lens && at::GradMode::is_enabled() && kv_b->requires_grad()) latent = only_valid(latent, layer.kv_lens);
  const auto [key, value] =
      expand_latents(layer.latents, attnpack::linear(latent, *kv_b, std::nullopt), layer.latent_dim, heads, v_dim);
  return {layer.query, key, value, false};
}

Tensor run(const Layer& layer, const Heads& heads, const std::optional<Tensor>& kv_b, const SymInt& v_dim,
           const std::optional<Tensor>& mask, bool causal, double dropout_p, double scale) {
  Tensor out = std::get<0>(attention_op(heads.query, heads.key, heads.value, mask, causal, 0, layer.q_offsets, -1, -1,
                                        layer.kv_lens, 0.0, std::nullopt, std::nullopt, std::nullopt, dropout_p,
                                        dropout_seed(dropout_p), scale));
  if (kv_b && heads.absorbed) out = unfold_output(out, *kv_b, v_dim);
  return out.transpose(1, 2).flatten(2);
}

// Of the dims that scores are made of, also where the query is wider. Without dims they are 0.
double default_scale(const std::optional<double>& scale, const Tensor& query) {
  const int64_t dims = query.sym_size(3).expect_int();
  return scale ? *scale : dims > 0 ? 1.0 / std::sqrt(static_cast<double>(dims)) : 1.0;
}

Tensor latent_attend_composite(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                               const std::optional<Tensor>& kv_b, SymInt v_dim, c10::string_view path,
                               ATTNPACK_LATENT_PARAMS) {
  check_up(query, latent, k_rope, kv_b, v_dim, path);
  const Layer layer = prepare(query, latent, k_rope, ATTNPACK_LATENT_ARGS);
  return run(layer, make_heads(layer, kv_b, v_dim, path), kv_b, v_dim, mask, causal, dropout_p,
             default_scale(scale, query));
}

std::tuple<Tensor, Tensor> latent_attend_with_weights_composite(const Tensor& query, const Tensor& latent,
                                                                const Tensor& k_rope, const std::optional<Tensor>& kv_b,
                                                                SymInt v_dim, c10::string_view path,
                                                                ATTNPACK_LATENT_PARAMS) {
  check_up(query, latent, k_rope, kv_b, v_dim, path);
  Layer layer = prepare(query, latent, k_rope, ATTNPACK_LATENT_ARGS);
  // As many columns as the longest sequence has keys; all that there is room for where tracing knows no values.
  if (layer.cached && !mask && !at::isTensorSubclassLike(*layer.kv_lens) && layer.kv_lens->numel() > 0) {
    layer.latents = layer.latents.narrow(2, 0, layer.kv_lens->max().item<int64_t>());
  }
  const Heads heads = make_heads(layer, kv_b, v_dim, path);
  const double by = default_scale(scale, query);
  const Tensor out = run(layer, heads, kv_b, v_dim, mask, causal, dropout_p, by);
  const std::optional<Tensor> none;
  return {out, scores_formula(heads.query, heads.key, mask, causal, 0, layer.q_offsets, -1, -1, layer.kv_lens, 0.0,
                              none, none, std::nullopt, 0.0, none, by, "probs")};
}

// The two halves of the expanded path, between which a kv_b_proj that is no plain linear makes kv of the latents.
std::tuple<Tensor, Tensor, Tensor, Tensor> latent_append_composite(const Tensor& query, const Tensor& latent,
                                                                   const Tensor& k_rope, ATTNPACK_LATENT_PARAMS) {
  const Layer layer = prepare(query, latent, k_rope, ATTNPACK_LATENT_ARGS);
  const auto options = at::TensorOptions(at::kLong).device(query.device());
  const SymInt batch = query.sym_size(0);
  const Tensor past = layer.q_offsets ? *layer.q_offsets : at::zeros_symint({batch}, options);
  const Tensor all = at::ones_symint({layer.latents.sym_size(2)}, options).sum().expand_symint({batch});
  const Tensor lens = layer.kv_lens ? layer.kv_lens->to(at::kLong) : all;
  return {layer.query.clone(), layer.latents.clone(), past, lens.clone()};
}

std::tuple<Tensor, Tensor> latent_expand_composite(const Tensor& latents, const Tensor& kv, SymInt latent_dim,
                                                   SymInt num_heads, SymInt v_dim) {
  return expand_latents(latents, kv, latent_dim, num_heads, v_dim);
}

void refuse_settings(const AttendOptions& o) {
  const auto refuse = [](bool given, const char* name) {
    ATTNPACK_CHECK(!given, name,
                   ": got a setting that latent attention does not have; leave it out, or make keys and values and "
                   "call attend");
  };
  refuse(o.window() != Window{-1, -1}, "window");
  refuse(o.softcap() != 0, "softcap");
  refuse(o.sinks().has_value(), "sinks");
  refuse(o.alibi_slopes().has_value(), "alibi_slopes");
  refuse(o.head_map().has_value(), "head_map");
}

template <class Result>
Result call(const char* name, const Tensor& query, const Tensor& latent, const Tensor& k_rope,
            const std::optional<Tensor>& kv_b, int64_t v_dim, const std::string& path, const AttendOptions& o) {
  refuse_settings(o);
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow(name, "")
                      .typed<Result(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, SymInt,
                                    c10::string_view, ATTNPACK_LATENT_PARAMS)>();
  const RopeSettings rope = o.rope().value_or(RopeSettings());
  std::optional<at::ArrayRef<double>> inv_freq;
  if (o.rope()) inv_freq = rope.inv_freq;
  std::optional<Tensor> latents, lengths;
  if (o.cache()) latents = o.cache()->key, lengths = o.cache()->lengths;
  return op.call(query, latent, k_rope, kv_b, v_dim, path, inv_freq, rope.factor, rope.interleaved, rope.long_inv_freq,
                 rope.growth, rope.trained_len, rope.raw_keys, o.positions(), o.cross(), latents, lengths, o.mask(),
                 o.causal(), o.kv_lens(), o.dropout_p(), o.scale());
}

}  // namespace

Tensor latent_attend(const Tensor& query, const Tensor& latent, const Tensor& k_rope, const std::optional<Tensor>& kv_b,
                     int64_t v_dim, const std::string& path, const AttendOptions& options) {
  return call<Tensor>("attnpack::latent_attend", query, latent, k_rope, kv_b, v_dim, path, options);
}

std::tuple<Tensor, Tensor> latent_attend_with_weights(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                                                      const std::optional<Tensor>& kv_b, int64_t v_dim,
                                                      const std::string& path, const AttendOptions& options) {
  return call<std::tuple<Tensor, Tensor>>("attnpack::latent_attend_with_weights", query, latent, k_rope, kv_b, v_dim,
                                          path, options);
}

std::tuple<Tensor, Tensor, Tensor> latent_project(const Tensor& query, const Tensor& latent, const Tensor& k_rope,
                                                  const std::optional<Tensor>& kv_b, int64_t v_dim,
                                                  const std::string& path, const AttendOptions& o) {
  refuse_settings(o);
  check_up(query, latent, k_rope, kv_b, v_dim, path);
  Layer layer;
  layer.latent_dim = latent.sym_size(2);
  layer.rotated_dim = k_rope.sym_size(2);
  const auto [q, k] = rotate_parts(query, k_rope, o.rope(), {o.positions(), o.cross(), std::nullopt, o.kv_lens()});
  layer.query = q;
  layer.latents = at::cat({latent.unsqueeze(1), k}, -1);
  const Heads heads = make_heads(layer, kv_b, v_dim, path == "auto" ? "expanded" : c10::string_view(path));
  return {heads.query, heads.key, heads.value};
}

}  // namespace attnpack

TORCH_LIBRARY_FRAGMENT(attnpack, m) {
  m.def(
      "latent_attend(Tensor query, Tensor latent, Tensor k_rope, Tensor? kv_b, SymInt v_dim, str "
      "path, " ATTNPACK_LATENT_SCHEMA " -> Tensor",
      &attnpack::latent_attend_composite);
  m.def(
      "latent_attend_with_weights(Tensor query, Tensor latent, Tensor k_rope, Tensor? kv_b, SymInt v_dim, str "
      "path, " ATTNPACK_LATENT_SCHEMA " -> (Tensor, Tensor)",
      &attnpack::latent_attend_with_weights_composite);
  m.def("latent_append(Tensor query, Tensor latent, Tensor k_rope, " ATTNPACK_LATENT_SCHEMA
        " -> (Tensor, Tensor, Tensor, Tensor)",
        &attnpack::latent_append_composite);
  m.def(
      "latent_expand(Tensor latents, Tensor kv, SymInt latent_dim, SymInt num_heads, SymInt v_dim) -> (Tensor, Tensor)",
      &attnpack::latent_expand_composite);
}

namespace attnpack {
namespace {

void register_parts(torch::Library& m) {
  m.impl("latent_attend", &latent_attend_composite);
  m.impl("latent_attend_with_weights", &latent_attend_with_weights_composite);
  m.impl("latent_append", &latent_append_composite);
}

}  // namespace
}  // namespace attnpack

// The schema names the cache's tensors as written, for which vmap has no rule; without a cache nothing is. For lazy
// tensors torch has one that breaks what is written (ops/lazy).
TORCH_LIBRARY_IMPL(attnpack, FuncTorchBatchedDecomposition, m) { attnpack::register_parts(m); }
TORCH_LIBRARY_IMPL(attnpack, Negative, m) { attnpack::register_parts(m); }
TORCH_LIBRARY_IMPL(attnpack, Conjugate, m) { attnpack::register_parts(m); }
