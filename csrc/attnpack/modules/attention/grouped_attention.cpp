#include <attnpack/modules/attention/grouped_attention.h>

#include <ATen/ATen.h>

#include <attnpack/core/check.h>
#include <attnpack/layers/alibi.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/heads.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/ops/rms_norm.h>
#include <attnpack/rope/rotate.h>

namespace attnpack {

namespace {

template <typename Options>
bool norms_values(const Options& o) {
  return o.qk_norm() && o.qk_norm().values().value_or(o.keys_as_values());
}

void check_qk_norm(const QkNorm& norm, const RotaryEmbedding& rope) {
  ATTNPACK_CHECK(!norm.all_heads() || !norm.after_rope(),
                 "qk_norm: got all_heads together with after_rope, which norms head by head; leave one of them out");
  ATTNPACK_CHECK(norm.weights() || (!norm.all_heads() && !norm.plus_one()),
                 "qk_norm: got weights=False together with all_heads or plus_one; leave them out");
  ATTNPACK_CHECK(!norm.after_rope() || !rope || !rope->settings.raw_keys,
                 "qk_norm: got after_rope, but this rope rotates stored keys in each call, so that nothing can be "
                 "normed behind it; use a rope whose frequencies do not follow the length, or raw_keys=False");
}

}  // namespace

template <typename Derived, HeadLayout layout>
void GroupedAttentionImpl<Derived, layout>::reset() {
  const auto& o = options;
  check_settings(o.window(), o.softcap(), o.dropout(), o.scale(), o.chunk());
  check_size("embed_dim", o.embed_dim());
  check_size("kdim", o.kdim().value_or(1));
  check_size("vdim", o.vdim().value_or(1));
  const auto head_dim = resolve_head_dim(o.embed_dim(), o.num_heads(), o.head_dim());
  if (layout != HeadLayout::kGroupedQuery) {
    const char* name = layout == HeadLayout::kMultiQuery ? "MultiQueryAttention" : "MultiHeadAttention";
    const auto wanted = layout == HeadLayout::kMultiQuery ? 1 : o.num_heads();
    ATTNPACK_CHECK(o.num_kv_heads() == wanted, "num_kv_heads: got ", o.num_kv_heads(), ", ", name, " has ", wanted,
                   "; use GroupedQueryAttention");
    ATTNPACK_CHECK(!o.head_map(), "head_map: got one, ", name, " has none; use GroupedQueryAttention");
  }
  check_heads(o.num_heads(), o.num_kv_heads(), o.head_map());
  check_size("q_lora_rank", o.q_lora_rank().value_or(1));
  check_gate_options(o.gate(), o.gate_activation());
  check_query_scale_options(o.query_scale());
  ATTNPACK_CHECK(
      !o.keys_as_values() || o.vdim().value_or(o.kdim().value_or(o.embed_dim())) == o.kdim().value_or(o.embed_dim()),
      "vdim: got ", o.vdim().value_or(0), ", want that of the keys, because with keys_as_values they are the ",
      "values; leave it out");
  ATTNPACK_CHECK(!o.qk_norm().all_heads() || !norms_values(o),
                 "qk_norm: got all_heads together with values, which are normed head by head; leave one of them out, ",
                 "or give values=False");
  check_qk_norm(o.qk_norm(), o.rope());
  options.head_dim(head_dim);

  const auto linear = [&](const char* name, int64_t in, int64_t out, bool bias) {
    return this->register_module(name, Linear(LinearOptions(in, out).bias(bias).factory(o.factory())));
  };
  const auto width = o.num_heads() * head_dim;
  if (o.q_lora_rank()) {
    q_a_proj = linear("q_a_proj", o.embed_dim(), *o.q_lora_rank(), o.bias());
    q_a_layernorm =
        this->register_module("q_a_layernorm", RMSNorm(RMSNormOptions(*o.q_lora_rank()).factory(o.factory())));
    q_b_proj = linear("q_b_proj", *o.q_lora_rank(), width, false);
  } else {
    q_proj = linear("q_proj", o.embed_dim(), width, o.bias());
  }
  if (o.own_keys()) k_proj = linear("k_proj", o.kdim().value_or(o.embed_dim()), o.num_kv_heads() * head_dim, o.bias());
  if (o.own_keys() && !o.keys_as_values())
    v_proj = linear("v_proj", o.vdim().value_or(o.embed_dim()), o.num_kv_heads() * head_dim, o.bias());
  o_proj = linear("o_proj", width, o.embed_dim(), o.out_bias().value_or(o.bias()));
  if (o.gate()) gate_proj = linear("gate_proj", o.embed_dim(), *o.gate() == "head" ? o.num_heads() : width, false);
  if (o.qk_norm() && o.qk_norm().weights()) {
    const auto norm = [&](const char* name, int64_t heads) {
      const auto& n = o.qk_norm();
      const auto dim = n.all_heads() ? heads * head_dim : head_dim;
      const auto made = RMSNormOptions(dim).eps(n.eps()).plus_one(n.plus_one()).factory(o.factory());
      return this->register_module(name, RMSNorm(made));
    };
    q_norm = norm("q_norm", o.num_heads());
    if (o.own_keys()) k_norm = norm("k_norm", o.num_kv_heads());
  }
  if (o.sinks())
    this->register_parameter("sinks", this->allocate("num_heads", {o.num_heads()}, sinks, o.factory()).zero_());
  bind_members();
  slopes = alibi_slopes(o.num_heads());
  if (o.rope()) {
    check_rope_dim(o.rope(), head_dim, text_of({"head_dim ", head_dim}));
    rope = this->register_module("rope", RotaryEmbedding(o.rope()->options));
  }
}

template <typename Derived, HeadLayout layout>
at::Tensor GroupedAttentionImpl<Derived, layout>::split(const at::Tensor& x, int64_t heads, RMSNorm& norm) const {
  const auto& n = options.qk_norm();
  if (n && n.all_heads()) return split_heads(norm(x), heads, *options.head_dim());
  const auto parts = split_heads(x, heads, *options.head_dim());
  return n && !n.after_rope() ? normed(parts, norm) : parts;
}

template <typename Derived, HeadLayout layout>
at::Tensor GroupedAttentionImpl<Derived, layout>::normed(const at::Tensor& heads, RMSNorm& norm) const {
  return norm ? norm(heads)
              : rms_norm(heads, at::ones({*options.head_dim()}, heads.options().requires_grad(false)),
                         options.qk_norm().eps());
}

template <typename Derived, HeadLayout layout>
at::Tensor GroupedAttentionImpl<Derived, layout>::rotated(const at::Tensor& heads, const at::Tensor& positions,
                                                          RMSNorm& norm) const {
  return normed(rope ? rotate_at(heads, rope->settings, positions) : heads, norm);
}

template <typename Derived, HeadLayout layout>
at::Tensor GroupedAttentionImpl<Derived, layout>::queries(const at::Tensor& x, const AttentionInputs& inputs) {
  const auto made =
      split(q_proj ? q_proj(x) : low_rank(q_a_proj, q_a_layernorm, q_b_proj, x), options.num_heads(), q_norm);
  return norms_rotated() ? rotated(made, query_positions(x, inputs), q_norm) : made;
}

template <typename Derived, HeadLayout layout>
at::Tensor GroupedAttentionImpl<Derived, layout>::values(const at::Tensor& x) const {
  const auto parts = split_heads(x, options.num_kv_heads(), *options.head_dim());
  RMSNorm none{nullptr};
  return norms_values(options) ? normed(parts, none) : parts;
}

template <typename Derived, HeadLayout layout>
at::Tensor GroupedAttentionImpl<Derived, layout>::output(const at::Tensor& joined, const at::Tensor& x) {
  return o_proj(gated(joined, x, gate_proj, options.num_heads(), options.gate_activation()));
}

template <typename Derived, HeadLayout layout>
std::tuple<at::Tensor, at::Tensor, at::Tensor> GroupedAttentionImpl<Derived, layout>::heads(
    const at::Tensor& x, const AttentionInputs& inputs) {
  const auto& context = inputs.context() ? *inputs.context() : x;
  const auto& value_context = inputs.value_context() ? *inputs.value_context() : context;
  const auto input_of = [](const Linear& layer) {
    return ProjectionInput{layer->options.in_features(), layer->weight};
  };
  const auto cross = cross_cache(inputs);
  check_own_keys(options.own_keys());
  if (!v_proj) check_keys_are_values(inputs.value_context().has_value());
  if (cross) cross->check_call(x, inputs.context());
  if (cross && cross->filled()) {
    check_input("x", x, options.embed_dim(), reads_x()->weight);
    return {queries(x, inputs), cross->k(), cross->v()};
  }
  check_inputs(x, inputs.context(), inputs.value_context(), inputs.cache() && !cross, input_of(reads_x()),
               input_of(k_proj), input_of(v_proj ? v_proj : k_proj));

  const bool self = !inputs.context() && !inputs.value_context();
  if (self && q_proj && v_proj) {
    const auto made = forward_all(x, {q_proj.get(), k_proj.get(), v_proj.get()});
    auto q = split(made[0], options.num_heads(), q_norm), k = split(made[1], options.num_kv_heads(), k_norm);
    if (norms_rotated()) {
      const auto at = query_positions(x, inputs);
      q = rotated(q, at, q_norm), k = rotated(k, at, k_norm);
    }
    return {q, k, values(made[2])};
  }
  const auto key = k_proj(context);
  auto k = split(key, options.num_kv_heads(), k_norm);
  if (norms_rotated())
    k = rotated(k, self ? query_positions(x, inputs) : token_positions(context, std::nullopt, std::nullopt), k_norm);
  return {queries(x, inputs), k, values(v_proj ? v_proj(value_context) : key)};
}

template <typename Derived, HeadLayout layout>
AttendOptions GroupedAttentionImpl<Derived, layout>::shared_settings(const at::Tensor& x,
                                                                     const AttentionInputs& inputs) const {
  check_input("x", x, options.embed_dim(), reads_x()->weight);
  auto result = settings(inputs);
  result.cache = keys_of_kv_from(inputs, x, options.num_kv_heads(), *options.head_dim(), *options.head_dim());
  return result;
}

template <typename Derived, HeadLayout layout>
AttendOptions GroupedAttentionImpl<Derived, layout>::settings(const AttentionInputs& inputs) const {
  auto result = attend_options(options, inputs, this->is_training(), norms_rotated() ? RotaryEmbedding(nullptr) : rope,
                               /*named_keys=*/true);
  result.key_index = inputs.key_index();
  result.key_block = inputs.key_block();
  if (sinks.defined()) result.sinks = sinks;
  if (options.alibi()) result.alibi_slopes = at::tensor(slopes, at::kDouble).to(o_proj->weight.device());
  return result;
}

template <typename Derived, HeadLayout layout>
at::Tensor GroupedAttentionImpl<Derived, layout>::attend_over(const at::Tensor& x, const AttentionInputs& inputs) {
  auto& kv = *inputs.kv;
  auto rules = with_query_scale(options, x, inputs, settings(inputs));
  at::Tensor query;
  if (kv.key.defined()) {
    check_input("x", x, options.embed_dim(), reads_x()->weight);
    const auto made = queries(x, inputs);
    query = rules.rope ? rotate_at(made, *rules.rope, query_positions(x, inputs)) : made;
  } else {
    const auto [q, k, v] = heads(x, inputs);
    std::tie(query, kv.key) = rotate(q, k, rules);
    kv.value = v;
  }
  rules.rope = std::nullopt;  // done
  return output(attend(query, kv.key, kv.value, rules), x);
}

template <typename Derived, HeadLayout layout>
at::Tensor GroupedAttentionImpl<Derived, layout>::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  if (inputs.kv) return attend_over(x, inputs);
  return AttentionSteps::forward(*this, x, inputs);
}

template <typename Derived, HeadLayout layout>
std::tuple<at::Tensor, at::Tensor> GroupedAttentionImpl<Derived, layout>::forward_with_weights(
    const at::Tensor& x, const AttentionInputs& inputs) {
  return AttentionSteps::forward_with_weights(*this, x, inputs);
}

template <typename Derived, HeadLayout layout>
std::tuple<at::Tensor, at::Tensor, at::Tensor> GroupedAttentionImpl<Derived, layout>::project(
    const at::Tensor& x, const AttentionInputs& inputs) {
  return AttentionSteps::project(*this, x, inputs);
}

template <typename Derived, HeadLayout layout>
void GroupedAttentionImpl<Derived, layout>::print(std::ostream& stream, const char* name) const {
  print_options(stream, name, options);
}

template class GroupedAttentionImpl<MultiHeadAttentionImpl, HeadLayout::kMultiHead>;
template class GroupedAttentionImpl<GroupedQueryAttentionImpl, HeadLayout::kGroupedQuery>;
template class GroupedAttentionImpl<MultiQueryAttentionImpl, HeadLayout::kMultiQuery>;

}  // namespace attnpack
