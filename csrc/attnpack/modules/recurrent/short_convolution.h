#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/leaf.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/recurrent/recurrent_module.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct ShortConvolutionOptions : OptionList<ShortConvolutionOptions> {
  ShortConvolutionOptions(int64_t channels, int64_t kernel_size) : channels_(channels), kernel_size_(kernel_size) {}
  ATTNPACK_OPTION(int64_t, channels);
  ATTNPACK_OPTION(int64_t, kernel_size);
  ATTNPACK_OPTION(bool, bias) = false;
  ATTNPACK_OPTION(Factory, factory);
};

// The causal convolution of each channel by itself (ops/causal_conv1d.h), with the parameters of torch's Conv1d.
class ShortConvolutionImpl : public LeafModule<ShortConvolutionImpl> {
 public:
  ShortConvolutionImpl(int64_t channels, int64_t kernel_size)
      : ShortConvolutionImpl(ShortConvolutionOptions(channels, kernel_size)) {}
  explicit ShortConvolutionImpl(ShortConvolutionOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x);  // [B, L, channels] -> [B, L, channels]

  void reset() override;
  void bind_members();
  void pretty_print(std::ostream& stream) const override;

  ShortConvolutionOptions options;
  at::Tensor weight;  // [channels, 1, kernel_size]
  at::Tensor bias;    // [channels], undefined without bias
};
TORCH_MODULE(ShortConvolution);

struct GatedConvolutionOptions : OptionList<GatedConvolutionOptions> {
  explicit GatedConvolutionOptions(int64_t embed_dim) : embed_dim_(embed_dim) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, conv_kernel_size) = 3;
  ATTNPACK_OPTION(bool, bias) = false;  // on both projections and the convolution
  ATTNPACK_OPTION(Factory, factory);
};

// LFM2's layer (Liquid AI 2025): out_proj(c * conv(b * x)) for b, c and x of in_proj. Its memory of a sequence is the
// last conv_kernel_size - 1 tokens.
class GatedConvolutionImpl : public torch::nn::Cloneable<GatedConvolutionImpl>, public RecurrentModule {
 public:
  explicit GatedConvolutionImpl(int64_t embed_dim) : GatedConvolutionImpl(GatedConvolutionOptions(embed_dim)) {}
  explicit GatedConvolutionImpl(GatedConvolutionOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;  // [B, L, E] -> [B, L, E]
  int64_t embed_dim() const override { return options.embed_dim(); }
  const Factory& factory() const override { return options.factory(); }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  GatedConvolutionOptions options;
  Linear in_proj{nullptr}, out_proj{nullptr};
  ShortConvolution conv{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})
};
TORCH_MODULE(GatedConvolution);

}  // namespace attnpack
