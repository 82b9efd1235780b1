#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/leaf.h>
#include <attnpack/modules/part.h>
#include <attnpack/ops/option_list.h>

#include <string>

namespace attnpack {

struct NormOptions : OptionList<NormOptions> {
  explicit NormOptions(int64_t dim) : dim_(dim) {}
  ATTNPACK_OPTION(int64_t, dim);
  ATTNPACK_OPTION(double, eps) = 1e-6;
  ATTNPACK_OPTION(Factory, factory);
};

struct LayerNormOptions : OptionList<LayerNormOptions> {
  explicit LayerNormOptions(int64_t dim) : dim_(dim) {}
  ATTNPACK_OPTION(int64_t, dim);
  ATTNPACK_OPTION(double, eps) = 1e-6;
  ATTNPACK_OPTION(bool, bias) = true;
  ATTNPACK_OPTION(Factory, factory);
};

struct RMSNormOptions : OptionList<RMSNormOptions> {
  explicit RMSNormOptions(int64_t dim) : dim_(dim) {}
  ATTNPACK_OPTION(int64_t, dim);
  ATTNPACK_OPTION(double, eps) = 1e-6;
  ATTNPACK_OPTION(bool, plus_one) = false;  // multiply by 1 + weight, as Gemma does; weight is 0 at first
  ATTNPACK_OPTION(Factory, factory);
};

// x / sqrt(mean(x^2) + eps) * weight over the last dim. (Zhang and Sennrich 2019.)
class RMSNormImpl : public LeafModule<RMSNormImpl>, public TokenModule {
 public:
  explicit RMSNormImpl(int64_t dim) : RMSNormImpl(RMSNormOptions(dim)) {}
  explicit RMSNormImpl(RMSNormOptions options);

  at::Tensor forward(const at::Tensor& x) override;
  std::tuple<at::Tensor, at::Tensor> forward_sum(const at::Tensor& x, const at::Tensor& added) override;
  std::optional<int64_t> embed_dim() const override { return options.dim(); }

  void reset() override;
  void bind_members() { weight = parameters_["weight"]; }
  void pretty_print(std::ostream& stream) const override;

  RMSNormOptions options;
  at::Tensor weight;  // [dim]
};
TORCH_MODULE(RMSNorm);

// RMSNorm on q and k: over head_dim (Qwen 3), or over all heads (OLMo 2).
struct QkNorm : OptionList<QkNorm> {
  QkNorm() = default;
  /* implicit */ QkNorm(bool on) : on_(on) {}
  explicit operator bool() const { return on_; }
  ATTNPACK_OPTION(bool, on) = false;
  ATTNPACK_OPTION(bool, all_heads) = false;
  ATTNPACK_OPTION(bool, plus_one) = false;  // as in RMSNormOptions
  ATTNPACK_OPTION(double, eps) = 1e-6;
  ATTNPACK_OPTION(bool, after_rope) = false;  // behind the rotation (HunYuan), not before it
  ATTNPACK_OPTION(bool, weights) = true;      // false: without weights (Llama 4); there is no q_norm and no k_norm
  // RMSNorm without weights on the values too (Gemma 4); default: where keys are the values.
  ATTNPACK_OPTION(std::optional<bool>, values);
};

// (x - mean) / sqrt(variance + eps) * weight + bias over the last dim. (Ba et al. 2016.)
class LayerNormImpl : public LeafModule<LayerNormImpl>, public TokenModule {
 public:
  explicit LayerNormImpl(int64_t dim) : LayerNormImpl(LayerNormOptions(dim)) {}
  explicit LayerNormImpl(LayerNormOptions options);

  at::Tensor forward(const at::Tensor& x) override;
  std::optional<int64_t> embed_dim() const override { return options.dim(); }

  void reset() override;
  void bind_members();
  void pretty_print(std::ostream& stream) const override;

  LayerNormOptions options;
  at::Tensor weight, bias;  // [dim]; bias undefined without one
};
TORCH_MODULE(LayerNorm);

// "rms", "rms_plus_one" (an RMSNorm with plus_one), "layer" or "layer_no_bias"; anything else raises.
Part<TokenModule> make_norm(const std::string& kind, const NormOptions& options);

}  // namespace attnpack
