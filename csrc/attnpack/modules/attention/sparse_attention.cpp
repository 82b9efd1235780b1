#include <attnpack/modules/attention/sparse_attention.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <attnpack/cache/sparse_cache.h>
#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/heads.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/modules/detail/selected_keys.h>

namespace attnpack {

namespace {

void check_options(const SparseAttentionOptions& o) {
  check_settings(std::nullopt, o.softcap(), o.dropout(), o.scale());
  check_size("embed_dim", o.embed_dim());
  check_heads(o.num_heads(), o.num_kv_heads(), std::nullopt);
  const bool blocks = o.selector() == "mean" || o.selector() == "max";
  ATTNPACK_CHECK(blocks || o.selector() == "indexer", "selector: got '", o.selector(),
                 "', want 'indexer', 'mean' or 'max'");
  ATTNPACK_CHECK(o.top_k(), "top_k: got none, want how many ", blocks ? "blocks" : "keys", " a query attends");
  check_size("top_k", *o.top_k());
  check_size("key_block", o.key_block().value_or(1));
  check_size("index_heads", o.index_heads().value_or(1));
  check_size("index_head_dim", o.index_head_dim().value_or(1));
  ATTNPACK_CHECK(blocks || o.key_block().value_or(1) == 1, "key_block: got ", o.key_block().value_or(1),
                 " for selector 'indexer', which names single keys; leave it out, or take 'mean' or 'max'");
  ATTNPACK_CHECK(!blocks || (!o.index_heads() && !o.index_head_dim()),
                 "index_heads, index_head_dim: got one for selector '", o.selector(),
                 "', which has no indexer; leave it out, or take 'indexer'");
  const auto local = o.num_local().value_or(blocks);
  const int64_t least = o.selector() == "mean" && o.causal();
  ATTNPACK_CHECK(local >= least && local <= *o.top_k(), "num_local: got ", local, ", want ", least, " to ", *o.top_k(),
                 ", top_k", least ? "; a causal 'mean' would know later keys of a query's own block" : "");
}

void check_inputs(const AttentionInputs& inputs, bool indexes) {
  check_selects(inputs, "SparseAttention", "a DynamicCache or StaticCache");
  ATTNPACK_CHECK(indexes || !inputs.index_cache(),
                 "index_cache: got one, but a selector of blocks has no keys of its own; leave it out");
  if (indexes) check_index_cache<SparseCache>(inputs, "SparseCache");
}

}  // namespace

void SparseAttentionImpl::reset() {
  auto& o = options;
  check_options(o);
  o.head_dim(resolve_head_dim(o.embed_dim(), o.num_heads(), o.head_dim()));
  o.key_block(o.key_block().value_or(indexes() ? 1 : 64)).num_local(o.num_local().value_or(!indexes()));
  const auto dim = *o.head_dim();
  const auto linear = [&](const char* name, int64_t in, int64_t out, bool bias) {
    return register_module(name, Linear(LinearOptions(in, out).bias(bias).factory(o.factory())));
  };
  q_proj = linear("q_proj", o.embed_dim(), o.num_heads() * dim, o.bias());
  k_proj = linear("k_proj", o.embed_dim(), o.num_kv_heads() * dim, o.bias());
  v_proj = linear("v_proj", o.embed_dim(), o.num_kv_heads() * dim, o.bias());
  o_proj = linear("o_proj", o.num_heads() * dim, o.embed_dim(), o.out_bias().value_or(o.bias()));
  if (indexes()) {
    const auto heads = o.index_heads().value_or(o.num_heads()), width = o.index_head_dim().value_or(dim);
    o.index_heads(heads).index_head_dim(width);
    index_q_proj = linear("index_q_proj", o.embed_dim(), heads * width, false);
    index_k_proj = linear("index_k_proj", o.embed_dim(), width, false);
    index_k_norm = register_module("index_k_norm", LayerNorm(LayerNormOptions(width).factory(o.factory())));
    index_weights_proj = linear("index_weights_proj", o.embed_dim(), heads, false);
  }
  if (o.rope()) {
    const auto least = std::min(dim, o.index_head_dim().value_or(dim));
    check_rope_dim(o.rope(), least, text_of({least, ", the smaller of head_dim and index_head_dim"}));
    rope = register_module("rope", RotaryEmbedding(o.rope()->options));
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> SparseAttentionImpl::heads(const at::Tensor& x) {
  const auto made = forward_all(x, {q_proj.get(), k_proj.get(), v_proj.get()});
  const auto dim = *options.head_dim(), kv_heads = options.num_kv_heads();
  return {split_heads(made[0], options.num_heads(), dim), split_heads(made[1], kv_heads, dim),
          split_heads(made[2], kv_heads, dim)};
}

IndexerTokens SparseAttentionImpl::indexer(const at::Tensor& x) {
  return {split_heads(index_q_proj(x), *options.index_heads(), *options.index_head_dim()),
          index_k_norm(index_k_proj(x)).unsqueeze(1), index_weights_proj(x)};
}

AttendOptions SparseAttentionImpl::settings(const AttentionInputs& inputs) const {
  auto without_index = inputs;
  without_index.index_cache(nullptr);
  auto r = attend_options(options, without_index, is_training(), rope);
  if (!indexes()) r.blocks = {*options.key_block(), *options.top_k(), *options.num_local(), options.selector()};
  return r;
}

std::optional<at::Tensor> SparseAttentionImpl::selected_keys(const at::Tensor& x, const AttentionInputs& of_call,
                                                             const LayerInputs& settings) {
  const at::NoGradGuard no_grad;
  return name_keys<SparseCache>(indexer(x), *options.top_k(), *options.num_local(), of_call, settings);
}

template <typename Call>
auto SparseAttentionImpl::run(const at::Tensor& x, const AttentionInputs& inputs, const Call& call) {
  check_input("x", x, options.embed_dim(), q_proj->weight);
  check_inputs(inputs, indexes());
  const auto sparse = std::dynamic_pointer_cast<SparseCache>(inputs.cache());
  return rollback_on_error(caches_of_selection<SparseCache>(inputs), [&] {
    auto options_of_call = settings(inputs);
    if (indexes()) options_of_call.key_index = selected_keys(x, inputs, options_of_call);
    if (sparse && keeps_sums()) sparse->keep_sums(*options.key_block(), x.sym_size(1));
    const auto [q, k, v] = heads(x);
    return with_cache(inputs.cache(), k, v, options_of_call,
                      [&, &q = q, &k = k, &v = v](const AttendOptions& o) { return call(q, k, v, o); });
  });
}

at::Tensor SparseAttentionImpl::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  return run(x, inputs, [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttendOptions& o) {
    return o_proj(attend(q, k, v, o));
  });
}

std::tuple<at::Tensor, at::Tensor> SparseAttentionImpl::forward_with_weights(const at::Tensor& x,
                                                                             const AttentionInputs& inputs) {
  return run(x, inputs,
             [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const AttendOptions& o) -> std::tuple<at::Tensor, at::Tensor> {
               const auto [out, weights] = attend_with_weights(q, k, v, o);
               return {o_proj(out), weights};
             });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> SparseAttentionImpl::project(const at::Tensor& x,
                                                                            const AttentionInputs& inputs) {
  check_input("x", x, options.embed_dim(), q_proj->weight);
  check_inputs(inputs, indexes());
  const auto [q, k, v] = heads(x);
  const auto [rotated_q, rotated_k] = rotate(q, k, settings(inputs));
  return {rotated_q, rotated_k, v};
}

at::Tensor SparseAttentionImpl::indexer_loss(const at::Tensor& x, bool sparse, const AttentionInputs& inputs) {
  ATTNPACK_CHECK(indexes(), "indexer_loss: got selector '", options.selector(),
                 "', which has nothing to train; want selector 'indexer'");
  check_input("x", x, options.embed_dim(), q_proj->weight);
  const auto read = AttentionInputs()
                        .mask(inputs.mask())
                        .causal(inputs.causal())
                        .positions(inputs.positions())
                        .kv_lens(inputs.kv_lens());
  auto of_call = settings(read);
  of_call.dropout_p = 0;
  at::Tensor probabilities;
  {
    const at::NoGradGuard no_grad;
    if (sparse) of_call.key_index = selected_keys(x, {}, of_call);
    const auto [q, k, v] = heads(x);
    probabilities = std::get<1>(attend_with_weights(q, k, v, of_call, /*at_names=*/of_call.key_index.has_value()));
  }
  return attnpack::indexer_loss(indexer(x.detach()), probabilities, of_call.key_index, of_call,
                                /*at_names=*/of_call.key_index.has_value());
}

std::shared_ptr<KVCache> SparseAttentionImpl::new_cache() const { return std::make_shared<SparseCache>(); }

bool SparseAttentionImpl::keeps_sums() const {
  return options.selector() == "mean" && !(rope && rope->settings.raw_keys);
}

void SparseAttentionImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::SparseAttention", options);
}

}  // namespace attnpack
