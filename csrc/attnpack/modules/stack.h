#pragma once

#include <torch/nn/modules/container/modulelist.h>

#include <attnpack/cache/model_cache.h>
#include <attnpack/modules/block.h>
#include <attnpack/modules/layer_tail.h>
#include <attnpack/modules/linear.h>
#include <attnpack/ops/option_list.h>

#include <string>
#include <vector>

namespace attnpack {

using DecoderInputs = DecoderInputsOf<ModelCache>;

// The options of a stack: blocks of one kind, and the parts before and after them.
template <typename Block>
struct StackOptions : OptionList<StackOptions<Block>> {
  explicit StackOptions(std::vector<Block> layers) : layers_(std::move(layers)) {}
  ATTNPACK_OPTION(std::vector<Block>, layers);
  ATTNPACK_OPTION(std::string, norm) = "rms";  // after the last block: "rms", "layer" or "none"
  ATTNPACK_OPTION(double, eps) = 1e-6;
  ATTNPACK_OPTION(Embedding, embed_tokens) = nullptr;  // with it the stack takes token ids [B, L]
  ATTNPACK_OPTION(double, embed_scale) = 1.0;          // factor on the embeddings, rounded to their dtype (Gemma)
  // Row p is added to what stands at position p: learned positions (GPT-2), or the fixed ones of
  // sinusoidal_positions (rope/sinusoidal.h).
  ATTNPACK_OPTION(Embedding, embed_positions) = nullptr;
  ATTNPACK_OPTION(double, dropout) = 0.0;                    // of the states before the first block, in training
  ATTNPACK_OPTION(Part<LayerInputTableImpl>, layer_inputs);  // the inputs of the blocks' tails, by token (Gemma 4)
};
using EncoderOptions = StackOptions<EncoderBlock>;
using DecoderOptions = StackOptions<DecoderBlock>;

// Children embed_tokens, embed_positions, layers and norm, as in a Llama model.
template <typename Derived, typename Block>
class StackImpl : public Container<Derived> {
 public:
  explicit StackImpl(const StackOptions<Block>& options);

  template <typename F>
  void for_each_part(const F& f) {
    if (embed_tokens) f("embed_tokens", embed_tokens);
    if (embed_positions) f("embed_positions", embed_positions);
    if (layer_inputs) f("layer_inputs", layer_inputs);
    f("layers", layers);
    if (norm) f("norm", norm);
  }

  // Block i. Its parts are members, as self_attn: layer(2)->self_attn.as<GroupedQueryAttention>()->q_proj. Raises for
  // an i beyond the last block.
  Block layer(size_t i) const;

  Part<EmbeddingImpl> embed_tokens, embed_positions;
  Part<LayerInputTableImpl> layer_inputs;
  double embed_scale, dropout;
  Part<torch::nn::ModuleListImpl> layers;
  Part<TokenModule> norm;

 protected:
  using BlockImpl = typename Block::ContainedType;
  // The states before the first block. positions [L] or [B, L] are those of x; default: those after `past` [B], if it
  // is given, else 0..L-1.
  at::Tensor embed(const char* name, const at::Tensor& x, const std::optional<at::Tensor>& positions,
                   const std::optional<at::Tensor>& past = std::nullopt) const;
  at::Tensor finish(const at::Tensor& x) const { return norm ? norm->forward(x) : x; }
  BlockImpl& block(size_t i) const { return *layers->template ptr<BlockImpl>(i); }

 public:
  // Device and dtype of the states. Those of the table; where it is stored, the dtype of the first block's numbers.
  at::TensorOptions state_options() const;
};

// EncoderBlocks one after the other, which all get the same inputs.
class EncoderImpl : public StackImpl<EncoderImpl, EncoderBlock> {
 public:
  using StackImpl::StackImpl;
  // [B, L, E], or ids [B, L] with embed_tokens -> [B, L, E]
  at::Tensor forward(const at::Tensor& x, const EncoderInputs& inputs = {}) {
    return run(this->embed_tokens ? "ids" : "x", x, inputs);
  }
  // The same; errors call x by the name that the caller's users know.
  at::Tensor run(const char* name, const at::Tensor& x, const EncoderInputs& inputs);
  void pretty_print(std::ostream& stream) const override { stream << "attnpack::Encoder"; }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(EncoderInputs())})
};
TORCH_MODULE(Encoder);

// DecoderBlocks one after the other, each with its own layer of the caches.
class DecoderImpl : public StackImpl<DecoderImpl, DecoderBlock> {
 public:
  using StackImpl::StackImpl;
  // [B, L, E], or ids [B, L] with embed_tokens -> [B, L, E]. A call that raises leaves the cache as it was.
  at::Tensor forward(const at::Tensor& x, const DecoderInputs& inputs = {}) {
    return run(this->embed_tokens ? "ids" : "x", x, inputs);
  }
  // The same; errors call x by the name that the caller's users know.
  at::Tensor run(const char* name, const at::Tensor& x, const DecoderInputs& inputs);
  // The layer whose keys layer i reads, if it has none of its own. Raises where there is no such layer before it.
  std::optional<size_t> source_of(size_t i) const;
  // An empty cache that grows, of the kind that each layer's self-attention fills.
  std::shared_ptr<ModelCache> new_cache() const;
  void pretty_print(std::ostream& stream) const override { stream << "attnpack::Decoder"; }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(DecoderInputs())})
};
TORCH_MODULE(Decoder);

// The inputs of EncoderDecoder::forward beside source and target.
struct EncoderDecoderInputs : OptionList<EncoderDecoderInputs> {
  ATTNPACK_OPTION(std::optional<at::Tensor>, source_lens);  // valid source tokens of each sequence, [B]
  ATTNPACK_OPTION(std::optional<at::Tensor>, target_lens);  // valid new target tokens of each sequence, [B]
  ATTNPACK_OPTION(std::shared_ptr<ModelCache>, cache);      // the cache of the decoder's self-attention
  // CrossCaches. Where they are filled, the encoder does not run, and the source may be undefined.
  ATTNPACK_OPTION(std::shared_ptr<ModelCache>, cross_cache);
};

// The encoder reads the source, the decoder writes the target with the encoder's output as context.
class EncoderDecoderImpl : public Container<EncoderDecoderImpl> {
 public:
  EncoderDecoderImpl(Part<EncoderImpl> encoder, Part<DecoderImpl> decoder);

  at::Tensor forward(const at::Tensor& source,                  // [B, Ls, E], or ids [B, Ls]
                     const at::Tensor& target,                  // [B, Lt, E], or ids [B, Lt]
                     const EncoderDecoderInputs& inputs = {});  // -> [B, Lt, E]
  // Its first half: the context of the decoder. source_lens [B] as in the inputs.
  at::Tensor encode(const at::Tensor& source,  // [B, Ls, E], or ids [B, Ls] -> [B, Ls, E]
                    const std::optional<at::Tensor>& source_lens = std::nullopt);
  // Its second half. With a filled cross_cache the context is not read, and may be undefined.
  at::Tensor decode(const at::Tensor& context,                 // [B, Ls, E]
                    const at::Tensor& target,                  // [B, Lt, E], or ids [B, Lt]
                    const EncoderDecoderInputs& inputs = {});  // -> [B, Lt, E]
  // An empty cross_cache: a CrossCache for each of the decoder's layers.
  std::shared_ptr<ModelCache> new_cross_cache() const;

  template <typename F>
  void for_each_part(const F& f) {
    f("encoder", encoder);
    f("decoder", decoder);
  }
  void pretty_print(std::ostream& stream) const override { stream << "attnpack::EncoderDecoder"; }

  Part<EncoderImpl> encoder;
  Part<DecoderImpl> decoder;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(EncoderDecoderInputs())})
};
TORCH_MODULE(EncoderDecoder);

}  // namespace attnpack
