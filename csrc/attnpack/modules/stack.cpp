#include <attnpack/modules/stack.h>

#include <cmath>

#include <attnpack/cache/cross_cache.h>
#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/dropout.h>
#include <attnpack/modules/norm.h>
#include <attnpack/ops/stored_linear.h>

namespace attnpack {

template <typename Derived, typename Block>
StackImpl<Derived, Block>::StackImpl(const StackOptions<Block>& options) {
  check_layers_given(static_cast<int64_t>(options.layers().size()));
  torch::nn::ModuleList list;
  for (size_t i = 0; i < options.layers().size(); ++i) {
    const auto& layer = options.layers()[i];
    ATTNPACK_CHECK(!layer.is_empty(), "layers[", i, "]: got an empty holder, want a block: make one with its options");
    list->push_back(layer);
  }
  layers = list;
  const auto embed_dim = block(0).self_attn->embed_dim();
  for (size_t i = 1; i < layers->size(); ++i) {
    check_layer_width(static_cast<int64_t>(i), block(i).self_attn->embed_dim(), embed_dim);
  }
  if (options.embed_tokens()) {
    embed_tokens = options.embed_tokens();
    check_embedding_width(embed_tokens->options.embed_dim(), embed_dim);
  }
  embed_scale = options.embed_scale();
  ATTNPACK_CHECK(std::isfinite(embed_scale), "embed_scale: got ", embed_scale, ", want a finite number, 1 for none");
  dropout = options.dropout();
  check_dropout("dropout", dropout);
  if (options.embed_positions()) {
    embed_positions = options.embed_positions();
    check_embedding_width(embed_positions->options.embed_dim(), embed_dim, "embed_positions");
  }
  if (options.norm() != "none") {
    const auto& attention = block(0).self_attn;
    norm =
        make_norm(options.norm(), NormOptions(attention->embed_dim()).eps(options.eps()).factory(attention->factory()));
  }
  layer_inputs = options.layer_inputs();
  ATTNPACK_CHECK(!layer_inputs || embed_tokens,
                 "layer_inputs: got a table, but no embed_tokens: it reads token ids too; give both");
  this->register_parts();
}

template <typename Derived, typename Block>
at::Tensor StackImpl<Derived, Block>::embed(const char* name, const at::Tensor& x,
                                            const std::optional<at::Tensor>& positions,
                                            const std::optional<at::Tensor>& past) const {
  auto h = x;
  if (embed_tokens) {
    h = embed_tokens->look_up(name, x);
    if (is_stored(embed_tokens->weight)) h = h.to(state_options());
    if (embed_scale != 1) h = h * at::full({}, embed_scale, h.options().requires_grad(false));
  } else {
    check_states(name, x, block(0).self_attn->embed_dim());
    check_input(name, x, block(0).self_attn->embed_dim(), {});
  }
  if (embed_positions) {
    const auto places = token_positions(h, positions, past);
    if (places.is_cpu()) check_learned_positions(places, embed_positions->weight.size(0));
    h = h + at::embedding(embed_positions->weight, places);
  }
  return dropped(h, dropout, *this);
}

namespace {

// The dtype of the module's first float parameter, found without a list of all of them: each step asks.
std::optional<at::ScalarType> float_type(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters(/*recurse=*/false))
    if (parameter.is_floating_point()) return parameter.scalar_type();
  for (const auto& child : module.children())
    if (const auto found = float_type(*child)) return found;
  return std::nullopt;
}

}  // namespace

template <typename Derived, typename Block>
at::TensorOptions StackImpl<Derived, Block>::state_options() const {
  const at::Tensor table = embed_tokens ? embed_tokens->weight : at::Tensor();
  const auto device = table.defined() ? table.device() : at::Device(at::kCPU);
  if (table.defined() && !is_stored(table)) return table.options().requires_grad(false);
  return at::TensorOptions(device).dtype(float_type(block(0)).value_or(at::kFloat));
}

template <typename Derived, typename Block>
Block StackImpl<Derived, Block>::layer(size_t i) const {
  ATTNPACK_CHECK(i < layers->size(), "layer: got ", i, ", want 0 to ", layers->size() - 1);
  return Block(layers->template ptr<BlockImpl>(i));
}

at::Tensor EncoderImpl::run(const char* name, const at::Tensor& x, const EncoderInputs& inputs) {
  auto h = embed(name, x, inputs.positions());
  for (size_t i = 0; i < layers->size(); ++i) h = block(i).forward(h, inputs);
  return finish(h);
}

std::optional<size_t> DecoderImpl::source_of(size_t i) const {
  const auto& from = block(i).kv_from;
  if (!from) return std::nullopt;
  const auto layer = static_cast<int64_t>(i);
  check_kv_source(layer, *from, *from < 0 || *from >= layer || !block(*from).kv_from);
  return *from;
}

at::Tensor DecoderImpl::run(const char* name, const at::Tensor& x, const DecoderInputs& inputs) {
  const auto& cache = inputs.cache();
  const auto& cross_cache = inputs.cross_cache();
  if (cache) check_cache_layers(cache->layers().size(), layers->size());
  if (cross_cache) check_cache_layers(cross_cache->layers().size(), layers->size());
  const auto run_layers = [&] {
    auto h = embed(name, x, inputs.positions(), cache ? past_lengths(cache->lengths(), x) : std::nullopt);
    const auto by_layer = layer_inputs ? std::make_optional(layer_inputs->forward(x, h)) : std::nullopt;
    std::vector<std::optional<size_t>> sources;  // of the layers' keys
    std::vector<std::shared_ptr<SharedKeys>> shared(layers->size());
    for (size_t i = 0; i < layers->size(); ++i) {
      const auto source = sources.emplace_back(source_of(i));
      if (source && !cache && !shared[*source]) shared[*source] = std::make_shared<SharedKeys>();
    }
    auto block_inputs = DecoderBlockInputs()
                            .context(inputs.context())
                            .mask(inputs.mask())
                            .positions(inputs.positions())
                            .kv_lens(inputs.kv_lens())
                            .context_mask(inputs.context_mask())
                            .context_lens(inputs.context_lens());
    for (size_t i = 0; i < layers->size(); ++i) {
      const auto source = sources[i];
      if (cache) block_inputs.cache(cache->layers()[i]);
      block_inputs.kv_from = cache && source ? cache->layers()[*source] : nullptr;
      block_inputs.kv = shared[source.value_or(i)];
      if (by_layer) block_inputs.layer_input = by_layer->select(-2, static_cast<int64_t>(i));
      if (cross_cache) block_inputs.cross_cache(cross_cache->layers()[i]);
      h = block(i).forward(h, block_inputs);
    }
    return finish(h);
  };
  const auto run_all = [&] { return cache ? cache->rollback_on_error(run_layers) : run_layers(); };
  return cross_cache ? cross_cache->rollback_on_error(run_all) : run_all();
}

std::shared_ptr<ModelCache> DecoderImpl::new_cache() const {
  std::vector<std::shared_ptr<KVCache>> caches;
  for (size_t i = 0; i < layers->size(); ++i) caches.push_back(block(i).self_attn->new_cache());
  return std::make_shared<ModelCache>(std::move(caches));
}

namespace {

bool holds_context(const EncoderDecoderInputs& inputs) {
  return inputs.cross_cache() && inputs.cross_cache()->len() > 0;
}

}  // namespace

EncoderDecoderImpl::EncoderDecoderImpl(Part<EncoderImpl> encoder, Part<DecoderImpl> decoder)
    : encoder(std::move(encoder)), decoder(std::move(decoder)) {
  ATTNPACK_CHECK(this->encoder, "encoder: got none, want an Encoder");
  ATTNPACK_CHECK(this->decoder, "decoder: got none, want a Decoder");
  register_parts();
}

at::Tensor EncoderDecoderImpl::forward(const at::Tensor& source, const at::Tensor& target,
                                       const EncoderDecoderInputs& inputs) {
  check_lengths("target_lens", inputs.target_lens(), target);
  if (holds_context(inputs)) return decode({}, target, inputs);
  ATTNPACK_CHECK(source.defined(), "source: got none, but no cross_cache holds it; give the first call the source");
  return decode(encode(source, inputs.source_lens()), target, inputs);
}

at::Tensor EncoderDecoderImpl::encode(const at::Tensor& source, const std::optional<at::Tensor>& source_lens) {
  check_lengths("source_lens", source_lens, source);
  return encoder->run("source", source, EncoderInputs().kv_lens(source_lens));
}

at::Tensor EncoderDecoderImpl::decode(const at::Tensor& context, const at::Tensor& target,
                                      const EncoderDecoderInputs& inputs) {
  check_lengths("target_lens", inputs.target_lens(), target);
  auto decoder_inputs = DecoderInputs()
                            .context_lens(inputs.source_lens())
                            .kv_lens(inputs.target_lens())
                            .cache(inputs.cache())
                            .cross_cache(inputs.cross_cache());
  if (!holds_context(inputs)) {
    ATTNPACK_CHECK(context.defined(), "context: got none, but no cross_cache holds it; give what encode returns");
    decoder_inputs.context(context);
  }
  return decoder->run("target", target, decoder_inputs);
}

std::shared_ptr<ModelCache> EncoderDecoderImpl::new_cross_cache() const {
  std::vector<std::shared_ptr<KVCache>> layers(decoder->layers->size());
  for (auto& layer : layers) layer = std::make_shared<CrossCache>();
  return std::make_shared<ModelCache>(std::move(layers));
}

template class StackImpl<EncoderImpl, EncoderBlock>;
template class StackImpl<DecoderImpl, DecoderBlock>;

}  // namespace attnpack
