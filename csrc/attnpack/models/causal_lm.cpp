#include <attnpack/models/causal_lm.h>

#include <cmath>

#include <attnpack/cache/latent_cache.h>
#include <attnpack/cache/paged_cache.h>
#include <attnpack/cache/sliding_window_cache.h>
#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/grouped_attention.h>
#include <attnpack/ops/linear.h>

namespace attnpack {

namespace {

Part<AttentionModule> make_attention(const CausalLMOptions& o, const RotaryEmbedding& rope) {
  if (o.latent()) {
    return MultiHeadLatentAttention(MultiHeadLatentAttentionOptions(*o.latent())
                                        .embed_dim(o.embed_dim())
                                        .num_heads(o.num_heads())
                                        .bias(o.bias())
                                        .rope(rope)
                                        .causal(true)
                                        .factory(o.factory()));
  }
  return GroupedQueryAttention(GroupedQueryAttentionOptions(o.embed_dim(), o.num_heads(), *o.num_kv_heads())
                                   .head_dim(o.head_dim())
                                   .bias(o.bias())
                                   .out_bias(o.out_bias())
                                   .qk_norm(o.qk_norm())
                                   .window(o.window())
                                   .rope(rope)
                                   .causal(true)
                                   .factory(o.factory()));
}

DecoderBlock make_block(const CausalLMOptions& o, const RotaryEmbedding& rope) {
  FeedForward feed_forward(FeedForwardOptions(o.embed_dim(), *o.hidden_dim()).bias(o.mlp_bias()).factory(o.factory()));
  return DecoderBlock(DecoderBlockOptions(make_attention(o, rope), feed_forward).eps(o.eps()));
}

void check_latent(const CausalLMOptions& o) {
  const auto refuse = [](bool given, const char* name) {
    ATTNPACK_CHECK(!given, name, ": got one together with latent, which has no such thing; leave one of them out");
  };
  refuse(o.num_kv_heads().has_value(), "num_kv_heads");
  refuse(o.head_dim().has_value(), "head_dim");
  refuse(o.qk_norm(), "qk_norm");
  refuse(o.window().has_value(), "window");
  refuse(o.out_bias().has_value(), "out_bias");
}

}  // namespace

void CausalLMImpl::reset() {
  auto& o = options;
  check_size("vocab_size", o.vocab_size());
  check_size("embed_dim", o.embed_dim());
  check_size("num_layers", o.num_layers());
  ATTNPACK_CHECK(o.init_std() >= 0 && std::isfinite(o.init_std()), "init_std: got ", o.init_std(),
                 ", want a number such as 0.02");
  if (o.latent()) {
    check_latent(o);
  } else {
    o.num_kv_heads(o.num_kv_heads().value_or(o.num_heads()));
    o.head_dim(resolve_head_dim(o.embed_dim(), o.num_heads(), o.head_dim()));
  }
  o.hidden_dim(o.hidden_dim().value_or(4 * o.embed_dim()));

  const auto rotated = o.latent() ? o.latent()->qk_rope_head_dim().value_or(0) : *o.head_dim();
  RotaryEmbedding rope(nullptr);
  if (rotated > 0 || !o.latent()) {
    rope = RotaryEmbedding(RotaryEmbeddingOptions(rotated)
                               .base(o.rope_base())
                               .max_positions(o.max_positions())
                               .scaling(o.rope_scaling())
                               .interleaved(o.rope_interleaved()));
  }
  Embedding embedding(EmbeddingOptions(o.vocab_size(), o.embed_dim()).factory(o.factory()));
  // An embedding that is also the head would, with N(0, 1), start at a loss of hundreds instead of ln V.
  embedding->weight.detach().mul_(o.init_std());
  std::vector<DecoderBlock> layers;
  for (int64_t i = 0; i < o.num_layers(); ++i) layers.push_back(make_block(o, rope));
  model = register_module("model", Decoder(DecoderOptions(layers).eps(o.eps()).embed_tokens(embedding)));
  if (!o.tie_embeddings()) {
    lm_head = register_module("lm_head", Linear(LinearOptions(o.embed_dim(), o.vocab_size()).factory(o.factory())));
  }
}

at::Tensor CausalLMImpl::hidden(const at::Tensor& ids, const CausalLMInputs& inputs) {
  check_lengths("lengths", inputs.lengths(), ids);
  return model->forward(ids, DecoderInputs()
                                 .cache(inputs.cache())
                                 .mask(inputs.mask())
                                 .positions(inputs.positions())
                                 .kv_lens(inputs.lengths()));
}

at::Tensor CausalLMImpl::head(const at::Tensor& hidden) {
  return lm_head ? lm_head(hidden) : attnpack::linear(hidden, model->embed_tokens->weight);
}

at::Tensor CausalLMImpl::forward(const at::Tensor& ids, const CausalLMInputs& inputs) {
  return head(hidden(ids, inputs));
}

std::shared_ptr<ModelCache> CausalLMImpl::dynamic_cache() const {
  if (!options.latent()) return std::make_shared<ModelCache>(options.num_layers());
  std::vector<std::shared_ptr<KVCache>> layers;
  for (int64_t i = 0; i < options.num_layers(); ++i) layers.push_back(std::make_shared<LatentCache>());
  return std::make_shared<ModelCache>(std::move(layers));
}

std::shared_ptr<ModelCache> CausalLMImpl::static_cache(int64_t batch, int64_t max_len) const {
  const auto& latent = options.latent();
  const int64_t width = latent ? *latent->kv_lora_rank() + *latent->qk_rope_head_dim() : *options.head_dim();
  auto shape = StaticCacheOptions(batch, latent ? 1 : *options.num_kv_heads(), max_len, width);
  if (latent) shape.v_head_dim(0);
  return std::make_shared<ModelCache>(options.num_layers(),
                                      shape.tensor(model->embed_tokens->weight.options().requires_grad(false)));
}

std::shared_ptr<ModelCache> CausalLMImpl::sliding_cache() const {
  const auto [left, right] = options.window().value_or(Window{-1, -1});
  if (left < 0 || right > 0) return dynamic_cache();
  std::vector<std::shared_ptr<KVCache>> layers;
  for (int64_t i = 0; i < options.num_layers(); ++i) {
    layers.push_back(std::make_shared<SlidingWindowCache>(SlidingWindowCacheOptions(left)));
  }
  return std::make_shared<ModelCache>(std::move(layers));
}

std::shared_ptr<ModelCache> CausalLMImpl::quantized_cache(const QuantizedCacheOptions& cache) const {
  std::vector<std::shared_ptr<KVCache>> layers;
  for (int64_t i = 0; i < options.num_layers(); ++i) layers.push_back(std::make_shared<QuantizedCache>(cache));
  return std::make_shared<ModelCache>(std::move(layers));
}

std::shared_ptr<ModelCache> CausalLMImpl::paged_cache(int64_t batch, int64_t num_pages) const {
  ATTNPACK_CHECK(!options.latent(),
                 "cache: got 'paged' for a model with latent attention, want 'dynamic', 'static' or "
                 "'none': pages hold the keys and values of heads");
  const auto shape = PagedCacheOptions(batch, *options.num_kv_heads(), *options.head_dim(), num_pages)
                         .tensor(model->embed_tokens->weight.options().requires_grad(false));
  std::vector<std::shared_ptr<KVCache>> layers;
  for (int64_t i = 0; i < options.num_layers(); ++i) layers.push_back(std::make_shared<PagedCache>(shape));
  return std::make_shared<ModelCache>(std::move(layers));
}

void CausalLMImpl::pretty_print(std::ostream& stream) const { print_options(stream, "attnpack::CausalLM", options); }

}  // namespace attnpack
