#include <attnpack/modules/stack.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/norm.h>

namespace attnpack {

namespace {

// Runs a part. If the part complains about its own argument `own`, the complaint names the caller's argument `callers`
// instead.
template <typename Call>
at::Tensor naming(const std::string& own, const std::string& callers, const Call& call) {
  try {
    return call();
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace(), start = "attnpack: " + own;
    if (text.rfind(start + ":", 0) != 0 && text.rfind(start + " ", 0) != 0) throw;
    TORCH_CHECK_VALUE(false, "attnpack: ", callers, text.substr(start.size()));
  }
}

}  // namespace

template <typename Derived, typename Block>
StackImpl<Derived, Block>::StackImpl(const StackOptions<Block>& options) {
  ATTNPACK_CHECK(!options.layers().empty(), "layers: got none, want at least one block");
  torch::nn::ModuleList list;
  for (size_t i = 0; i < options.layers().size(); ++i) {
    const auto& layer = options.layers()[i];
    ATTNPACK_CHECK(!layer.is_empty(), "layers[", i, "]: got an empty holder, want a block: make one with its options");
    list->push_back(layer);
  }
  layers = list;
  const auto embed_dim = block(0).self_attn->embed_dim();
  for (size_t i = 1; i < layers->size(); ++i) {
    const auto width = block(i).self_attn->embed_dim();
    ATTNPACK_CHECK(width == embed_dim, "layers[", i, "]: got width ", width, ", want ", embed_dim,
                   " as the first block has; each reads what the one before it gives");
  }
  if (options.embed_tokens()) {
    embed_tokens = options.embed_tokens();
    const auto width = embed_tokens->options.embed_dim();
    ATTNPACK_CHECK(width == embed_dim, "embed_tokens: got width ", width, ", want ", embed_dim, " as the blocks have");
  }
  if (options.norm() != "none") {
    const auto& attention = block(0).self_attn;
    norm =
        make_norm(options.norm(), NormOptions(attention->embed_dim()).eps(options.eps()).factory(attention->factory()));
  }
  this->register_parts();
}

template <typename Derived, typename Block>
at::Tensor StackImpl<Derived, Block>::embed(const at::Tensor& x) const {
  if (embed_tokens) return embed_tokens->forward(x);
  ATTNPACK_CHECK(x.is_floating_point(), "x: got ", x.scalar_type(), " of shape ", x.sizes(),
                 ", want states [batch, length, ", block(0).self_attn->embed_dim(),
                 "]; to take token numbers give the stack embed_tokens");
  return x;
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
  const auto from = EncoderInputs().kv_lens(inputs.source_lens());
  const auto memory = naming(encoder->input_name(), "source", [&] { return encoder->forward(source, from); });
  const auto to =
      DecoderInputs(memory).context_lens(inputs.source_lens()).kv_lens(inputs.target_lens()).cache(inputs.cache());
  return naming(decoder->input_name(), "target", [&] { return decoder->forward(target, to); });
}

template class StackImpl<EncoderImpl, EncoderBlock>;
template class StackImpl<DecoderImpl, DecoderBlock>;

}  // namespace attnpack
