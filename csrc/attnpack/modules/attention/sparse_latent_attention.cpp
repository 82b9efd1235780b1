#include <attnpack/modules/attention/sparse_latent_attention.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/heads.h>
#include <attnpack/modules/detail/selected_keys.h>

namespace attnpack {

void LightningIndexerImpl::reset() {
  const auto& o = options;
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, Linear(LinearOptions(in, out).bias(false).factory(o.factory())));
  };
  const auto width = *o.index_head_dim();
  wq_b = linear("wq_b", *o.q_lora_rank(), *o.index_heads() * width);
  wk = linear("wk", o.embed_dim(), width);
  k_norm = register_module("k_norm", LayerNorm(LayerNormOptions(width).factory(o.factory())));
  weights_proj = linear("weights_proj", o.embed_dim(), *o.index_heads());
}

IndexerTokens LightningIndexerImpl::forward(const at::Tensor& low, const at::Tensor& x) {
  return {split_heads(wq_b(low), *options.index_heads(), *options.index_head_dim()), k_norm(wk(x)).unsqueeze(1),
          weights_proj(x)};
}

void SparseLatentAttentionImpl::reset() {
  auto& o = options;
  ATTNPACK_CHECK(o.top_k(), "top_k: got none, want how many keys a query attends");
  check_size("top_k", *o.top_k());
  check_size("index_heads", o.index_heads().value_or(1));
  check_size("index_head_dim", o.index_head_dim().value_or(1));
  ATTNPACK_CHECK(o.q_lora_rank(), "q_lora_rank: got none, want the width of the queries' latent, which the indexer of ",
                 kName, " reads");
  LatentAttentionImpl::reset();
  const auto width = o.index_head_dim().value_or(*o.qk_nope_head_dim() + *o.qk_rope_head_dim());
  o.index_heads(o.index_heads().value_or(o.num_heads())).index_head_dim(width);
  if (o.rope()) check_rope_dim(o.rope(), width, text_of({width, ", index_head_dim"}));
  indexer = register_module("indexer", LightningIndexer(o));
}

LayerInputs SparseLatentAttentionImpl::index_inputs(const LatentAttendOptions& settings) const {
  LayerInputs inputs = settings;
  if (inputs.rope) inputs.rope->interleaved = options.index_interleaved();
  return inputs;
}

template <typename Call>
auto SparseLatentAttentionImpl::select(const at::Tensor& x, const AttentionInputs& inputs, const Call& call) {
  check_selects(inputs, kName, "a LatentCache");
  ATTNPACK_CHECK(!inputs.key_index(), "key_index: got one, but the indexer of ", kName,
                 " names the keys; leave it out, or take MultiHeadLatentAttention");
  check_index_cache<LatentCache>(inputs, "LatentCache");
  auto without_index = inputs;
  without_index.index_cache(nullptr);
  check_call(x, without_index);
  return rollback_on_error(caches_of_selection<LatentCache>(inputs), [&] {
    auto settings_of_call = settings(without_index);
    const auto low = query_latent(x);
    {
      const at::NoGradGuard no_grad;
      settings_of_call.key_index =
          name_keys<LatentCache>(indexer(low, x), *options.top_k(), 0, inputs, index_inputs(settings_of_call));
    }
    return call(heads(x, without_index, low), settings_of_call);
  });
}

at::Tensor SparseLatentAttentionImpl::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  return select(x, inputs, [&](const Projected& projected, const LatentAttendOptions& o) {
    return attend_over(x, projected, inputs.cache(), o);
  });
}

std::tuple<at::Tensor, at::Tensor> SparseLatentAttentionImpl::forward_with_weights(const at::Tensor& x,
                                                                                   const AttentionInputs& inputs) {
  return select(x, inputs, [&](const Projected& projected, const LatentAttendOptions& o) {
    return attend_over_with_weights(x, projected, inputs.cache(), o);
  });
}

at::Tensor SparseLatentAttentionImpl::indexer_loss(const at::Tensor& x, bool sparse, const AttentionInputs& inputs) {
  const auto read = AttentionInputs()
                        .mask(inputs.mask())
                        .causal(inputs.causal())
                        .positions(inputs.positions())
                        .kv_lens(inputs.kv_lens());
  check_selects(read, kName, "a LatentCache");
  check_call(x, read);
  auto of_call = settings(read);
  of_call.dropout_p = 0;
  at::Tensor low, probabilities;
  {
    const at::NoGradGuard no_grad;
    low = query_latent(x);
    if (sparse)
      of_call.key_index = name_keys<LatentCache>(indexer(low, x), *options.top_k(), 0, {}, index_inputs(of_call));
    const auto p = heads(x, read, low);
    probabilities = std::get<1>(latent_attend_with_weights(p.query, p.latent, p.k_rope, kv_b(), *options.v_head_dim(),
                                                           options.path(), of_call,
                                                           /*at_names=*/of_call.key_index.has_value()));
  }
  return attnpack::indexer_loss(indexer(low, x.detach()), probabilities, of_call.key_index, index_inputs(of_call),
                                /*at_names=*/of_call.key_index.has_value());
}

}  // namespace attnpack
