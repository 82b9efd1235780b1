#include <attnpack/modules/stack.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/checks.h>
#include <attnpack/modules/norm.h>

namespace attnpack {

template <typename Derived, typename Block>
StackImpl<Derived, Block>::StackImpl(const StackOptions<Block>& options) {
  ATTNPACK_CHECK(!options.layers().empty(), "layers: got none, want at least one block");
  torch::nn::ModuleList list;
  for (const auto& layer : options.layers()) list->push_back(layer);
  layers = list;
  if (options.embed_tokens()) embed_tokens = options.embed_tokens();
  if (options.norm() != "none") {
    const auto& attention = block(0).self_attn;
    norm =
        make_norm(options.norm(), NormOptions(attention->embed_dim()).eps(options.eps()).factory(attention->factory()));
  }
  this->register_parts();
}

at::Tensor EncoderImpl::forward(const at::Tensor& x, const EncoderInputs& inputs) {
  auto h = embed(x);
  for (size_t i = 0; i < layers->size(); ++i) h = block(i).forward(h, inputs);
  return finish(h);
}

at::Tensor DecoderImpl::forward(const at::Tensor& x, const DecoderInputs& inputs) {
  const auto& cache = inputs.cache();
  ATTNPACK_CHECK(!cache || cache->layers().size() == layers->size(), "cache: got one of ",
                 cache ? cache->layers().size() : 0, " layers, want ", layers->size(), " as the model has");
  const auto run = [&] {
    auto h = embed(x);
    for (size_t i = 0; i < layers->size(); ++i) {
      auto own = DecoderBlockInputs()
                     .context(inputs.context())
                     .mask(inputs.mask())
                     .positions(inputs.positions())
                     .kv_lens(inputs.kv_lens())
                     .context_mask(inputs.context_mask())
                     .context_lens(inputs.context_lens());
      if (cache) own.cache(cache->layers()[i]);
      h = block(i).forward(h, own);
    }
    return finish(h);
  };
  return cache ? cache->all_or_none(run) : run();
}

EncoderDecoderImpl::EncoderDecoderImpl(Part<EncoderImpl> encoder, Part<DecoderImpl> decoder)
    : encoder(std::move(encoder)), decoder(std::move(decoder)) {
  register_parts();
}

at::Tensor EncoderDecoderImpl::forward(const at::Tensor& source, const at::Tensor& target,
                                       const EncoderDecoderInputs& inputs) {
  check_lengths("source_lens", inputs.source_lens(), source);
  check_lengths("target_lens", inputs.target_lens(), target);
  const auto memory = encoder->forward(source, EncoderInputs().kv_lens(inputs.source_lens()));
  return decoder->forward(
      target,
      DecoderInputs(memory).context_lens(inputs.source_lens()).kv_lens(inputs.target_lens()).cache(inputs.cache()));
}

template class StackImpl<EncoderImpl, EncoderBlock>;
template class StackImpl<DecoderImpl, DecoderBlock>;

}  // namespace attnpack
