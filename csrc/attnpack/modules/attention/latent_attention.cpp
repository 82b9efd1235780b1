#include <attnpack/modules/attention/latent_attention.h>

#include <cmath>

#include <attnpack/core/check.h>
#include <attnpack/layers/detail/latent_algebra.h>
#include <attnpack/layers/latent_attend.h>
#include <attnpack/modules/attention/sparse_latent_attention.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/heads.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/modules/state_dict.h>

namespace attnpack {

namespace {

int64_t required(const char* module, const char* name, const std::optional<int64_t>& size, int64_t least = 1) {
  ATTNPACK_CHECK(size, name, ": got none, ", module, " needs it");
  ATTNPACK_CHECK(*size >= least, name, ": got ", *size, ", want ", least == 0 ? "0 or more" : "at least 1");
  return *size;
}

}  // namespace

template <typename Derived, typename Options>
void LatentAttentionImpl<Derived, Options>::reset() {
  const auto& o = options;
  check_settings(std::nullopt, 0.0, o.dropout(), o.scale());
  check_size("embed_dim", o.embed_dim());
  check_size("num_heads", o.num_heads());
  check_size("q_lora_rank", o.q_lora_rank().value_or(1));
  const auto latent = required(Derived::kName, "kv_lora_rank", o.kv_lora_rank());
  const auto nope = required(Derived::kName, "qk_nope_head_dim", o.qk_nope_head_dim());
  const auto rotated = required(Derived::kName, "qk_rope_head_dim", o.qk_rope_head_dim(), 0);
  const auto v_dim = required(Derived::kName, "v_head_dim", o.v_head_dim());
  ATTNPACK_CHECK(o.path() == "auto" || o.path() == "expanded" || o.path() == "absorbed", "path: got '", o.path(),
                 "', want 'auto', 'expanded' or 'absorbed'");
  check_gate_options(o.gate(), o.gate_activation());
  if constexpr (requires { o.query_scale(); }) check_query_scale_options(o.query_scale());
  ATTNPACK_CHECK(
      !o.folded() || o.gate() != "element",
      "gate: got 'element' for a folded layer, which never makes the numbers that it gates; take 'head', or a "
      "layer that is not folded");
  if (o.rope()) check_rope_dim(o.rope(), rotated, text_of({"qk_rope_head_dim ", rotated}));

  const auto linear = [&](const char* name, int64_t in, int64_t out, bool bias = false) {
    return this->register_module(name, Linear(LinearOptions(in, out).bias(bias).factory(o.factory())));
  };
  const auto norm = [&](const char* name, int64_t dim) {
    return this->register_module(name, RMSNorm(RMSNormOptions(dim).factory(o.factory())));
  };
  const auto query_dim = o.num_heads() * ((o.folded() ? latent : nope) + rotated);
  if (o.q_lora_rank()) {
    q_a_proj = linear("q_a_proj", o.embed_dim(), *o.q_lora_rank(), o.bias());
    if (o.latent_norm()) q_a_layernorm = norm("q_a_layernorm", *o.q_lora_rank());
    q_b_proj = linear("q_b_proj", *o.q_lora_rank(), query_dim);
  } else {
    q_proj = linear("q_proj", o.embed_dim(), query_dim);
  }
  kv_a_proj_with_mqa = linear("kv_a_proj_with_mqa", o.embed_dim(), latent + rotated, o.bias());
  if (o.latent_norm()) kv_a_layernorm = norm("kv_a_layernorm", latent);
  if (!o.folded()) kv_b_proj = linear("kv_b_proj", latent, o.num_heads() * (nope + v_dim));
  o_proj = linear("o_proj", o.num_heads() * (o.folded() ? latent : v_dim), o.embed_dim(), o.bias());
  if (o.gate())
    gate_proj = linear("gate_proj", o.embed_dim(), *o.gate() == "head" ? o.num_heads() : o.num_heads() * v_dim);
  if (o.rope()) rope = this->register_module("rope", RotaryEmbedding(o.rope()->options));
}

template <typename Derived, typename Options>
double LatentAttentionImpl<Derived, Options>::softmax_scale() const {
  const auto dims = static_cast<double>(*options.qk_nope_head_dim() + *options.qk_rope_head_dim());
  return options.scale().value_or(1.0 / std::sqrt(dims)) * (rope ? rope->settings.softmax_factor : 1.0);
}

template <typename Derived, typename Options>
std::optional<at::Tensor> LatentAttentionImpl<Derived, Options>::kv_b() const {
  return kv_b_proj ? std::make_optional(kv_b_proj->weight) : std::nullopt;
}

template <typename Derived, typename Options>
void LatentAttentionImpl<Derived, Options>::check_call(const at::Tensor& x, const AttentionInputs& inputs) const {
  check_one_latent(inputs.value_context().has_value());
  check_no_kv_from(Derived::kName, inputs.kv_from() != nullptr);
  const ProjectionInput latents{options.embed_dim(), kv_a_proj_with_mqa->weight};
  check_inputs(x, inputs.context(), inputs.value_context(), inputs.cache() != nullptr,
               {options.embed_dim(), q_proj ? q_proj->weight : q_a_proj->weight}, latents, latents);
}

template <typename Derived, typename Options>
at::Tensor LatentAttentionImpl<Derived, Options>::query_latent(const at::Tensor& x) {
  if (q_proj) return x;
  const auto low = q_a_proj(x);
  return q_a_layernorm ? q_a_layernorm(low) : low;
}

template <typename Derived, typename Options>
typename LatentAttentionImpl<Derived, Options>::Projected LatentAttentionImpl<Derived, Options>::heads(
    const at::Tensor& x, const AttentionInputs& inputs, const at::Tensor& low) {
  const auto queries = q_proj ? q_proj(low) : q_b_proj(low);
  const auto both = kv_a_proj_with_mqa(inputs.context() ? *inputs.context() : x);
  const auto latent = both.narrow(-1, 0, *options.kv_lora_rank());
  const auto k_rope = both.narrow(-1, *options.kv_lora_rank(), *options.qk_rope_head_dim());
  return {split_heads(queries, options.num_heads(), queries.size(-1) / options.num_heads()),
          kv_a_layernorm ? kv_a_layernorm(latent) : latent, k_rope, both.unsqueeze(1)};
}

template <typename Derived, typename Options>
LatentAttendOptions LatentAttentionImpl<Derived, Options>::settings(const AttentionInputs& inputs) const {
  auto others = inputs;
  others.key_index(std::nullopt);
  LatentAttendOptions result{layer_inputs(others, options.causal())};
  result.key_index = inputs.key_index();
  result.dropout_p = this->is_training() ? options.dropout() : 0.0;
  result.scale = softmax_scale();
  if (rope) result.rope = rope->settings;
  return result;
}

template <typename Derived, typename Options>
template <typename Call>
auto LatentAttentionImpl<Derived, Options>::run(const at::Tensor& x, const Projected& projected,
                                                const std::shared_ptr<KVCache>& cache,
                                                const LatentAttendOptions& settings, const Call& call) {
  return with_room(
      cache, x.size(1), settings,
      [&](KVCache& into) { return into.reserve_latents(projected.joined, *options.kv_lora_rank()); }, call);
}

template <typename Derived, typename Options>
at::Tensor LatentAttentionImpl<Derived, Options>::output(const at::Tensor& joined, const at::Tensor& x) {
  return o_proj(gated(joined, x, gate_proj, options.num_heads(), options.gate_activation()));
}

template <typename Derived, typename Options>
at::Tensor LatentAttentionImpl<Derived, Options>::attend_over(const at::Tensor& x, const Projected& p,
                                                              const std::shared_ptr<KVCache>& cache,
                                                              const LatentAttendOptions& settings) {
  return run(x, p, cache, settings, [&](const LatentAttendOptions& o) {
    return output(latent_attend(p.query, p.latent, p.k_rope, kv_b(), *options.v_head_dim(), options.path(), o), x);
  });
}

template <typename Derived, typename Options>
std::tuple<at::Tensor, at::Tensor> LatentAttentionImpl<Derived, Options>::attend_over_with_weights(
    const at::Tensor& x, const Projected& p, const std::shared_ptr<KVCache>& cache,
    const LatentAttendOptions& settings) {
  return run(x, p, cache, settings, [&](const LatentAttendOptions& o) -> std::tuple<at::Tensor, at::Tensor> {
    auto [out, weights] =
        latent_attend_with_weights(p.query, p.latent, p.k_rope, kv_b(), *options.v_head_dim(), options.path(), o);
    return {output(out, x), weights};
  });
}

template <typename Derived, typename Options>
at::Tensor LatentAttentionImpl<Derived, Options>::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  check_call(x, inputs);
  return attend_over(x, heads(x, inputs, query_latent(x)), inputs.cache(),
                     with_query_scale(options, x, inputs, settings(inputs)));
}

template <typename Derived, typename Options>
std::tuple<at::Tensor, at::Tensor> LatentAttentionImpl<Derived, Options>::forward_with_weights(
    const at::Tensor& x, const AttentionInputs& inputs) {
  check_call(x, inputs);
  return attend_over_with_weights(x, heads(x, inputs, query_latent(x)), inputs.cache(),
                                  with_query_scale(options, x, inputs, settings(inputs)));
}

template <typename Derived, typename Options>
std::tuple<at::Tensor, at::Tensor, at::Tensor> LatentAttentionImpl<Derived, Options>::project(
    const at::Tensor& x, const AttentionInputs& inputs) {
  check_call(x, inputs);
  const auto p = heads(x, inputs, query_latent(x));
  return latent_project(p.query, p.latent, p.k_rope, kv_b(), *options.v_head_dim(), options.path(), settings(inputs));
}

template <typename Derived, typename Options>
std::shared_ptr<Derived> LatentAttentionImpl<Derived, Options>::fold() const {
  ATTNPACK_CHECK(!options.folded(), "kv_b_proj is folded already, fold() wants a module that has one");
  const at::NoGradGuard no_grad;
  const std::string query = q_proj ? "q_proj.weight" : "q_b_proj.weight";
  auto tensors = state_dict(*this);
  const Factory beside{o_proj->weight.device(), o_proj->weight.scalar_type()}, nowhere{at::kMeta, beside.dtype};
  auto folded =
      std::make_shared<Derived>(Options(options).folded(true).factory(nowhere));  // its parameters are replaced below
  std::tie(tensors[query], tensors["o_proj.weight"]) =
      fold_weights(tensors[query], tensors["kv_b_proj.weight"], tensors["o_proj.weight"], options.num_heads());
  tensors.erase("kv_b_proj.weight");
  for (auto& [name, tensor] : tensors) tensor = tensor.to(beside.options(), /*non_blocking=*/false, /*copy=*/true);
  assign_state_dict(*folded, tensors);
  copy_requires_grad(*this, *folded);
  folded->options.factory(beside);
  folded->train(this->is_training());
  return folded;
}

template <typename Derived, typename Options>
void LatentAttentionImpl<Derived, Options>::pretty_print(std::ostream& stream) const {
  print_options(stream, text_of({"attnpack::", Derived::kName}).c_str(), options,
                !rope && *options.qk_rope_head_dim() > 0 ? ", rope=none: no dim is rotated" : "");
}

template class LatentAttentionImpl<MultiHeadLatentAttentionImpl, MultiHeadLatentAttentionOptions>;
template class LatentAttentionImpl<SparseLatentAttentionImpl, SparseLatentAttentionOptions>;

}  // namespace attnpack
