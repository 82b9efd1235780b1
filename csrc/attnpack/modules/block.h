#pragma once

#include <attnpack/modules/attention_module.h>
#include <attnpack/modules/layer_tail.h>
#include <attnpack/modules/part.h>
#include <attnpack/ops/option_list.h>

#include <functional>
#include <string>

namespace attnpack {

// The inputs of an encoder's forward (block or stack) beside x.
struct EncoderInputs : OptionList<EncoderInputs> {
  ATTNPACK_OPTION(std::optional<at::Tensor>, mask);       // broadcastable to [B, Hq, L, L]
  ATTNPACK_OPTION(std::optional<at::Tensor>, positions);  // int64 [L] or [B, L], for RoPE
  ATTNPACK_OPTION(std::optional<at::Tensor>, kv_lens);    // valid tokens of each sequence, [B]
};

// The same for a decoder; Cache is KVCache for a block, ModelCache for a stack.
template <typename Cache>
struct DecoderInputsOf : OptionList<DecoderInputsOf<Cache>> {
  DecoderInputsOf() = default;
  /* implicit */ DecoderInputsOf(at::Tensor context) : context_(std::move(context)) {}

  ATTNPACK_OPTION(std::optional<at::Tensor>, context);       // read by cross-attention, [B, Lc, E]
  ATTNPACK_OPTION(std::optional<at::Tensor>, mask);          // broadcastable to [B, Hq, L, keys], on top of causality
  ATTNPACK_OPTION(std::shared_ptr<Cache>, cache);            // self-attention's cache
  ATTNPACK_OPTION(std::optional<at::Tensor>, positions);     // int64 [L] or [B, L], for RoPE
  ATTNPACK_OPTION(std::optional<at::Tensor>, kv_lens);       // valid new tokens of each sequence, [B]
  ATTNPACK_OPTION(std::optional<at::Tensor>, context_mask);  // broadcastable to [B, Hq, L, Lc]
  ATTNPACK_OPTION(std::optional<at::Tensor>, context_lens);  // valid context tokens of each sequence, [B]
  // cross-attention's: a CrossCache, for a stack a ModelCache of them. Where it is filled, the context is not read.
  ATTNPACK_OPTION(std::shared_ptr<Cache>, cross_cache);

 public:
  // A stack sets these.
  std::shared_ptr<KVCache> kv_from;       // the cache of the layer whose keys the block reads
  std::shared_ptr<SharedKeys> kv;         // these keys themselves, in a call without caches
  std::optional<at::Tensor> layer_input;  // the input of the block's tail, [B, L, input_dim]
};
using DecoderBlockInputs = DecoderInputsOf<KVCache>;

struct EncoderBlockOptions : OptionList<EncoderBlockOptions> {
  EncoderBlockOptions(Part<AttentionModule> attention, Part<TokenModule> feed_forward)
      : attention_(std::move(attention)), feed_forward_(std::move(feed_forward)) {}
  ATTNPACK_OPTION(Part<AttentionModule>, attention);
  ATTNPACK_OPTION(Part<TokenModule>, feed_forward);
  ATTNPACK_OPTION(std::string, norm) = "rms";  // or "layer", ...: see make_norm
  // x + f(norm(x)); false: norm(x + f(x)), as in Vaswani et al. 2017.
  ATTNPACK_OPTION(bool, pre_norm) = true;
  ATTNPACK_OPTION(double, eps) = 1e-6;
  ATTNPACK_OPTION(double, dropout) = 0.0;         // of what attention and feed-forward add to x, in training
  ATTNPACK_OPTION(double, residual_scale) = 1.0;  // factor on what they add
};

// Self-attention (causal if the attention module is), then the feed-forward, each with a norm and a residual.
class EncoderBlockImpl : public Container<EncoderBlockImpl> {
 public:
  EncoderBlockImpl(Part<AttentionModule> attention, Part<TokenModule> feed_forward)
      : EncoderBlockImpl(EncoderBlockOptions(std::move(attention), std::move(feed_forward))) {}
  explicit EncoderBlockImpl(const EncoderBlockOptions& options);

  at::Tensor forward(const at::Tensor& x, const EncoderInputs& inputs = {});  // [B, L, E] -> [B, L, E]

  template <typename F>
  void for_each_part(const F& f) {
    f("self_attn", self_attn);
    f("mlp", mlp);
    f("input_layernorm", input_layernorm);
    f("post_attention_layernorm", post_attention_layernorm);
  }
  void pretty_print(std::ostream& stream) const override { stream << "attnpack::EncoderBlock"; }

  bool pre_norm;
  double dropout, residual_scale;
  Part<AttentionModule> self_attn;
  Part<TokenModule> mlp, input_layernorm, post_attention_layernorm;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(EncoderInputs())})
};
TORCH_MODULE(EncoderBlock);

struct DecoderBlockOptions : OptionList<DecoderBlockOptions> {
  DecoderBlockOptions(Part<AttentionModule> attention, Part<TokenModule> feed_forward)
      : attention_(std::move(attention)), feed_forward_(std::move(feed_forward)) {}
  ATTNPACK_OPTION(Part<AttentionModule>, attention);
  ATTNPACK_OPTION(Part<TokenModule>, feed_forward);
  ATTNPACK_OPTION(std::string, norm) = "rms";  // or "layer", ...: see make_norm
  ATTNPACK_OPTION(bool, pre_norm) = true;      // as in EncoderBlockOptions
  // Other places of the norms, in place of pre_norm; not together with cross-attention:
  // "sandwich": x + norm(f(norm(x))) (Gemma 2); "output": x + norm(f(x)) (OLMo 2);
  // "parallel": x + attention(norm(x)) + feed_forward(norm(x)) with one norm (Falcon-7B), "parallel_two" with two.
  ATTNPACK_OPTION(std::optional<std::string>, layout);
  ATTNPACK_OPTION(Part<AttentionModule>, cross_attention);
  ATTNPACK_OPTION(double, eps) = 1e-6;
  ATTNPACK_OPTION(double, dropout) = 0.0;         // of what attention and feed-forward add to x, in training
  ATTNPACK_OPTION(double, residual_scale) = 1.0;  // factor on what they add (Granite)
  ATTNPACK_OPTION(Part<LayerTailImpl>, tail);     // what stands behind the feed-forward (Gemma 4)
  // In a Decoder: self-attention reads the keys and values of this earlier layer. The module has own_keys false.
  ATTNPACK_OPTION(std::optional<int64_t>, kv_from);
};

// Self-attention, which is causal whatever the module's own setting says. Then cross-attention to the whole context, if
// a context is given; its RoPE rotates queries by their positions in the target, with a cache too. Then the
// feed-forward. Each has a norm and a residual. Without cross-attention the parameter names are those of a Llama layer.
// A layout has some of the norms input_layernorm, post_attention_layernorm, pre_feedforward_layernorm and
// post_feedforward_layernorm, with the names of Gemma 2.
class DecoderBlockImpl : public Container<DecoderBlockImpl> {
 public:
  DecoderBlockImpl(Part<AttentionModule> attention, Part<TokenModule> feed_forward)
      : DecoderBlockImpl(DecoderBlockOptions(std::move(attention), std::move(feed_forward))) {}
  explicit DecoderBlockImpl(const DecoderBlockOptions& options);

  at::Tensor forward(const at::Tensor& x, const DecoderBlockInputs& inputs = {});  // [B, L, E] -> [B, L, E]

  template <typename F>
  void for_each_part(const F& f) {
    f("self_attn", self_attn);
    f("mlp", mlp);
    if (input_layernorm) f("input_layernorm", input_layernorm);
    if (post_attention_layernorm) f("post_attention_layernorm", post_attention_layernorm);
    if (pre_feedforward_layernorm) f("pre_feedforward_layernorm", pre_feedforward_layernorm);
    if (post_feedforward_layernorm) f("post_feedforward_layernorm", post_feedforward_layernorm);
    if (cross_attn) {
      f("cross_attn", cross_attn);
      f("cross_attention_layernorm", cross_attention_layernorm);
    }
    if (tail) f("tail", tail);
  }
  void pretty_print(std::ostream& stream) const override { stream << "attnpack::DecoderBlock"; }

  bool pre_norm;
  double dropout, residual_scale;
  std::optional<std::string> layout;
  std::optional<int64_t> kv_from;
  Part<AttentionModule> self_attn, cross_attn;
  Part<LayerTailImpl> tail;
  Part<TokenModule> mlp, input_layernorm, post_attention_layernorm, pre_feedforward_layernorm,
      post_feedforward_layernorm, cross_attention_layernorm;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(DecoderBlockInputs())})

 private:
  // The block without its tail. attend is self-attention.
  at::Tensor run(const at::Tensor& x, const DecoderBlockInputs& inputs,
                 const std::function<at::Tensor(const at::Tensor&)>& attend);
  at::Tensor run_layout(const at::Tensor& x, const std::function<at::Tensor(const at::Tensor&)>& attend);
};
TORCH_MODULE(DecoderBlock);

}  // namespace attnpack
