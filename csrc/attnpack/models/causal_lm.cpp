#include <attnpack/models/causal_lm.h>

#include <cmath>
#include <set>

#include <attnpack/cache/latent_cache.h>
#include <attnpack/cache/paged_cache.h>
#include <attnpack/cache/recurrent_cache.h>
#include <attnpack/cache/sliding_window_cache.h>
#include <attnpack/core/padded.h>
#include <attnpack/modules/attention/grouped_attention.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/layer_tail.h>
#include <attnpack/modules/recurrent/gated_delta_net.h>
#include <attnpack/modules/recurrent/kimi_delta_attention.h>
#include <attnpack/modules/recurrent/linear_attention.h>
#include <attnpack/modules/recurrent/mamba2.h>
#include <attnpack/ops/softcap.h>
#include <attnpack/rope/sinusoidal.h>

namespace attnpack {

namespace {

Part<AttentionModule> make_recurrent(const CausalLMOptions& o) {
  const auto& r = *o.recurrent();
  const auto heads = r.num_v_heads().value_or(o.num_heads());
  const auto eps = r.norm_eps().value_or(o.eps());
  const auto width = [&] { return resolve_head_dim(o.embed_dim(), heads, r.head_k_dim()); };
  if (r.kind() == "gated_delta_net") {
    return GatedDeltaNet(GatedDeltaNetOptions(o.embed_dim(), r.num_k_heads().value_or(heads), heads)
                             .head_k_dim(width())
                             .head_v_dim(r.head_v_dim().value_or(width()))
                             .conv_kernel_size(r.conv_kernel_size().value_or(4))
                             .norm_eps(eps)
                             .allow_neg_eigval(r.allow_neg_eigval())
                             .factory(o.factory()));
  }
  if (r.kind() == "kimi_delta_attention") {
    return KimiDeltaAttention(KimiDeltaAttentionOptions(o.embed_dim(), heads)
                                  .head_dim(width())
                                  .conv_kernel_size(r.conv_kernel_size().value_or(4))
                                  .norm_eps(eps)
                                  .factory(o.factory()));
  }
  if (r.kind() == "linear_attention") {
    return LinearAttention(LinearAttentionOptions(o.embed_dim(), heads)
                               .head_dim(width())
                               .feature_map(r.feature_map())
                               .decay(r.decay())
                               .bias(r.bias())
                               .factory(o.factory()));
  }
  if (r.kind() == "mamba2") {
    return Mamba2(Mamba2Options(o.embed_dim(), heads)
                      .state_dim(width())
                      .head_dim(r.head_v_dim().value_or(width()))
                      .num_groups(r.num_k_heads().value_or(1))
                      .conv_kernel_size(r.conv_kernel_size().value_or(4))
                      .conv_bias(r.conv_bias())
                      .bias(r.bias())
                      .norm_eps(eps)
                      .factory(o.factory()));
  }
  ATTNPACK_CHECK(
      r.kind() == "gated_convolution", "recurrent: got kind '", r.kind(),
      "', want 'gated_delta_net', 'kimi_delta_attention', 'linear_attention', 'mamba2' or 'gated_convolution'");
  return GatedConvolution(GatedConvolutionOptions(o.embed_dim())
                              .conv_kernel_size(r.conv_kernel_size().value_or(3))
                              .bias(r.bias())
                              .factory(o.factory()));
}

Part<AttentionModule> make_attention(const CausalLMOptions& o, const LayerSettings& layer,
                                     const RotaryEmbedding& rope) {
  if (layer.recurrent()) return make_recurrent(o);
  if (o.latent()) {
    return MultiHeadLatentAttention(MultiHeadLatentAttentionOptions(*o.latent())
                                        .embed_dim(o.embed_dim())
                                        .num_heads(o.num_heads())
                                        .bias(o.bias())
                                        .rope(rope)
                                        .causal(true)
                                        .dropout(o.attention_dropout())
                                        .factory(o.factory()));
  }
  const auto scores = o.scores().value_or(ScoreSettings());
  return GroupedQueryAttention(GroupedQueryAttentionOptions(o.embed_dim(), o.num_heads(), *layer.num_kv_heads())
                                   .head_dim(layer.head_dim())
                                   .keys_as_values(layer.keys_as_values())
                                   .own_keys(!layer.kv_from())
                                   .bias(o.bias())
                                   .out_bias(o.out_bias())
                                   .qk_norm(layer.qk_norm() ? o.qk_norm() : QkNorm(false))
                                   .window(layer.window())
                                   .chunk(layer.chunk())
                                   .softcap(scores.softcap())
                                   .sinks(scores.sinks())
                                   .alibi(scores.alibi())
                                   .scale(scores.scale())
                                   .query_scale(layer.query_scale() ? scores.query_scale() : std::nullopt)
                                   .gate(scores.gate())
                                   .rope(rope)
                                   .causal(true)
                                   .dropout(o.attention_dropout())
                                   .factory(o.factory()));
}

// The dims of a head that rotate.
int64_t rotated_dims(const CausalLMOptions& o, const LayerSettings& layer) {
  if (o.latent()) return o.latent()->qk_rope_head_dim().value_or(0);
  return o.scores().value_or(ScoreSettings()).rope_dim().value_or(*layer.head_dim());
}

RotaryEmbedding make_rope(const CausalLMOptions& o, const LayerSettings& layer) {
  const bool none = layer.recurrent() || !layer.rope() || (o.latent() && rotated_dims(o, layer) == 0);
  if (none) return nullptr;
  return RotaryEmbedding(RotaryEmbeddingOptions(rotated_dims(o, layer))
                             .base(*layer.rope_base())
                             .max_positions(o.max_positions())
                             .scaling(layer.rope_scaling())
                             .interleaved(o.rope_interleaved()));
}

Part<TokenModule> make_feed_forward(const CausalLMOptions& o, const LayerSettings& layer) {
  if (layer.experts()) {
    return MixtureOfExperts(MixtureOfExpertsOptions(*o.experts()).embed_dim(o.embed_dim()).factory(o.factory()));
  }
  return FeedForward(FeedForwardOptions(o.embed_dim(), *layer.hidden_dim())
                         .activation(o.activation())
                         .bias(o.mlp_bias())
                         .factory(o.factory()));
}

LayerTail make_tail(const CausalLMOptions& o) {
  if (!o.tail()) return nullptr;
  return LayerTail(LayerTailOptions(o.embed_dim())
                       .input_dim(o.tail()->input_dim())
                       .activation(o.activation())
                       .eps(o.eps())
                       .factory(o.factory()));
}

LayerInputTable make_layer_inputs(const CausalLMOptions& o) {
  if (!o.tail() || !o.tail()->input_dim()) return nullptr;
  return LayerInputTable(LayerInputTableOptions(o.tail()->vocab_size().value_or(o.vocab_size()), o.embed_dim(),
                                                o.num_layers(), *o.tail()->input_dim())
                             .eps(o.eps())
                             .factory(o.factory()));
}

DecoderBlock make_block(const CausalLMOptions& o, const LayerSettings& layer) {
  return DecoderBlock(DecoderBlockOptions(make_attention(o, layer, make_rope(o, layer)), make_feed_forward(o, layer))
                          .norm(o.norm())
                          .layout(layer.layout())
                          .eps(o.eps())
                          .dropout(o.dropout())
                          .residual_scale(o.residual_scale())
                          .tail(make_tail(o))
                          .kv_from(layer.kv_from()));
}

Embedding fixed_positions(const CausalLMOptions& o) {
  Embedding made(EmbeddingOptions(o.max_positions(), o.embed_dim()).factory(o.factory()));
  made->weight.set_requires_grad(false);
  made->weight.copy_(sinusoidal_positions(o.max_positions(), o.embed_dim()));
  return made;
}

void check_latent(const CausalLMOptions& o) {
  const auto refuse = [](bool given, const char* name) {
    ATTNPACK_CHECK(!given, name, ": got one together with latent, which has no such thing; leave one of them out");
  };
  refuse(o.num_kv_heads().has_value(), "num_kv_heads");
  refuse(o.head_dim().has_value(), "head_dim");
  refuse(bool(o.qk_norm()), "qk_norm");
  refuse(o.window().has_value(), "window");
  refuse(o.out_bias().has_value(), "out_bias");
  refuse(o.scores().has_value(), "scores");
  for (const auto& layer : o.layer_settings()) {
    refuse(layer.window().has_value(), "layer_settings: window");
    refuse(layer.chunk().has_value(), "layer_settings: chunk");
    refuse(layer.num_kv_heads().has_value(), "layer_settings: num_kv_heads");
    refuse(layer.head_dim().has_value(), "layer_settings: head_dim");
    refuse(layer.keys_as_values(), "layer_settings: keys_as_values");
    refuse(layer.kv_from().has_value(), "layer_settings: kv_from");
  }
}

void check_families(const CausalLMOptions& o) {
  static const std::set<std::string> kinds{"rope", "learned", "sinusoidal", "none"};
  ATTNPACK_CHECK(kinds.contains(o.position_embedding()), "position_embedding: got '", o.position_embedding(),
                 "', want 'rope', 'learned', 'sinusoidal' or 'none'");
  check_dropout("dropout", o.dropout());
  check_dropout("attention_dropout", o.attention_dropout());
  ATTNPACK_CHECK(o.final_softcap() >= 0 && std::isfinite(o.final_softcap()), "final_softcap: got ", o.final_softcap(),
                 ", want a number above 0, or 0 for none");
  ATTNPACK_CHECK(std::isfinite(o.logit_scale()), "logit_scale: got ", o.logit_scale(),
                 ", want a finite number, 1 for none");
  ATTNPACK_CHECK(!o.head_bias() || !o.tie_embeddings(),
                 "head_bias: got True together with tie_embeddings, whose head is the embedding and has no bias; leave "
                 "one of them out");
  ATTNPACK_CHECK(o.layer_settings().empty() || static_cast<int64_t>(o.layer_settings().size()) == o.num_layers(),
                 "layer_settings: got ", o.layer_settings().size(), " of them, want one for each of ", o.num_layers(),
                 " layers, or none");
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
  check_families(o);

  const auto table = [&](int64_t rows) {
    Embedding made(EmbeddingOptions(rows, o.embed_dim()).factory(o.factory()));
    // An embedding that is also the head would, with N(0, 1), start at a loss of hundreds instead of ln V.
    made->weight.detach().mul_(o.init_std());
    return made;
  };
  const auto embedding = table(o.vocab_size());
  std::vector<DecoderBlock> layers;
  for (const auto& layer : resolved_layers()) layers.push_back(make_block(o, layer));
  auto stack = DecoderOptions(layers)
                   .norm(o.norm())
                   .eps(o.eps())
                   .embed_tokens(embedding)
                   .embed_scale(o.embed_scale())
                   .dropout(o.dropout())
                   .layer_inputs(make_layer_inputs(o));
  if (o.position_embedding() == "learned") stack.embed_positions(table(o.max_positions()));
  if (o.position_embedding() == "sinusoidal") stack.embed_positions(fixed_positions(o));
  model = register_module("model", Decoder(stack));
  if (!o.tie_embeddings()) {
    lm_head = register_module(
        "lm_head", Linear(LinearOptions(o.embed_dim(), o.vocab_size()).bias(o.head_bias()).factory(o.factory())));
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
  check_defined("hidden", hidden);
  const auto logits = lm_head ? lm_head(hidden) : model->embed_tokens->logits(hidden);
  const auto scaled = options.logit_scale() == 1 ? logits : logits * options.logit_scale();
  return softcapped(scaled, options.final_softcap());
}

at::Tensor CausalLMImpl::forward(const at::Tensor& ids, const CausalLMInputs& inputs) {
  return head(hidden(ids, inputs));
}

std::vector<LayerSettings> CausalLMImpl::resolved_layers() const {
  const auto& o = options;
  auto layers = o.layer_settings();
  if (layers.empty()) layers.resize(o.num_layers());
  for (auto& layer : layers) {
    if (!layer.window()) layer.window(o.window());
    if (!layer.rope_base()) layer.rope_base(o.rope_base());
    if (!layer.rope_scaling()) layer.rope_scaling(o.rope_scaling());
    layer.rope(layer.rope() && o.position_embedding() == "rope");
    layer.experts(layer.experts() && o.experts());
    layer.recurrent(layer.recurrent() && o.recurrent());
    if (!layer.layout()) layer.layout(o.layout());
    if (!layer.num_kv_heads()) layer.num_kv_heads(o.num_kv_heads());
    if (!layer.head_dim()) layer.head_dim(o.head_dim());
    if (!layer.hidden_dim()) layer.hidden_dim(o.hidden_dim());
  }
  return layers;
}

std::shared_ptr<ModelCache> CausalLMImpl::dynamic_cache() const { return model->new_cache(); }

std::shared_ptr<ModelCache> CausalLMImpl::caches_by_layer(
    const std::function<std::shared_ptr<KVCache>(const LayerSettings&, int64_t)>& make) const {
  auto caches = dynamic_cache()->layers();
  const auto layers = resolved_layers();
  for (size_t i = 0; i < caches.size(); ++i) {
    if (layers[i].recurrent() || layers[i].kv_from()) continue;
    if (auto made = make(layers[i], static_cast<int64_t>(i))) caches[i] = std::move(made);
  }
  return std::make_shared<ModelCache>(std::move(caches));
}

std::shared_ptr<ModelCache> CausalLMImpl::static_cache(int64_t batch, int64_t max_len) const {
  const auto& latent = options.latent();
  const auto like = model->state_options();
  return caches_by_layer([&](const LayerSettings& layer, int64_t) -> std::shared_ptr<KVCache> {
    if (latent) {
      const auto width = *latent->kv_lora_rank() + *latent->qk_rope_head_dim();
      return std::make_shared<StaticCache>(StaticCacheOptions(batch, 1, max_len, width).v_head_dim(0).tensor(like));
    }
    return std::make_shared<StaticCache>(
        StaticCacheOptions(batch, *layer.num_kv_heads(), max_len, *layer.head_dim()).tensor(like));
  });
}

std::shared_ptr<ModelCache> CausalLMImpl::sliding_cache() const {
  std::set<int64_t> read;  // by other layers, which take no ring
  for (const auto& layer : options.layer_settings())
    if (layer.kv_from()) read.insert(*layer.kv_from());
  return caches_by_layer([&](const LayerSettings& layer, int64_t i) -> std::shared_ptr<KVCache> {
    const auto [left, right] = layer.window().value_or(Window{-1, -1});
    if (left < 0 || right > 0 || read.contains(i)) return nullptr;
    return std::make_shared<SlidingWindowCache>(SlidingWindowCacheOptions(left));
  });
}

std::shared_ptr<ModelCache> CausalLMImpl::quantized_cache(const QuantizedCacheOptions& cache) const {
  return caches_by_layer([&](const LayerSettings&, int64_t) { return std::make_shared<QuantizedCache>(cache); });
}

std::shared_ptr<ModelCache> CausalLMImpl::paged_cache(int64_t batch, int64_t num_pages) const {
  ATTNPACK_CHECK(!options.latent(),
                 "cache: got 'paged' for a model with latent attention, want 'dynamic', 'static', 'int8' "
                 "or 'none': pages hold the keys and values of heads");
  const auto like = model->state_options();
  return caches_by_layer([&](const LayerSettings& layer, int64_t) -> std::shared_ptr<KVCache> {
    return std::make_shared<PagedCache>(
        PagedCacheOptions(batch, *layer.num_kv_heads(), *layer.head_dim(), num_pages).tensor(like));
  });
}

void CausalLMImpl::pretty_print(std::ostream& stream) const { print_options(stream, "attnpack::CausalLM", options); }

}  // namespace attnpack
