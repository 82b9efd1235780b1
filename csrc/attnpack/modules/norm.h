#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/leaf.h>
#include <attnpack/modules/part.h>

#include <string>

namespace attnpack {

struct NormOptions {
  explicit NormOptions(int64_t dim) : dim_(dim) {}
  TORCH_ARG(int64_t, dim);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(Factory, factory);

 public:
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    visit("dim", self.dim_);
    visit("eps", self.eps_);
    visit("factory", self.factory_);
  }
};
using LayerNormOptions = NormOptions;

struct RMSNormOptions {
  explicit RMSNormOptions(int64_t dim) : dim_(dim) {}
  TORCH_ARG(int64_t, dim);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(bool, plus_one) = false;  // multiply by 1 + weight, as Gemma does; weight is 0 at first
  TORCH_ARG(Factory, factory);

 public:
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    visit("dim", self.dim_);
    visit("eps", self.eps_);
    visit("plus_one", self.plus_one_);
    visit("factory", self.factory_);
  }
};

// x / sqrt(mean(x^2) + eps) * weight over the last dim. (Zhang and Sennrich 2019.)
class RMSNormImpl : public LeafModule<RMSNormImpl>, public TokenModule {
 public:
  explicit RMSNormImpl(int64_t dim) : RMSNormImpl(RMSNormOptions(dim)) {}
  explicit RMSNormImpl(RMSNormOptions options);

  at::Tensor forward(const at::Tensor& x) override;
  std::optional<int64_t> embed_dim() const override { return options.dim(); }

  void reset() override;
  void bind_members() { weight = parameters_["weight"]; }
  void pretty_print(std::ostream& stream) const override;

  RMSNormOptions options;
  at::Tensor weight;  // [dim]
};
TORCH_MODULE(RMSNorm);

// RMSNorm on q and k before RoPE: over head_dim (Qwen 3), or over all heads (OLMo 2).
struct QkNorm {
  QkNorm() = default;
  /* implicit */ QkNorm(bool on) : on_(on) {}
  explicit operator bool() const { return on_; }
  TORCH_ARG(bool, on) = false;
  TORCH_ARG(bool, all_heads) = false;
  TORCH_ARG(bool, plus_one) = false;  // as in RMSNormOptions
  TORCH_ARG(double, eps) = 1e-6;
  // RMSNorm without weights on the values too (Gemma 4); default: where keys are the values.
  TORCH_ARG(std::optional<bool>, values);

 public:
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    visit("on", self.on_);
    visit("all_heads", self.all_heads_);
    visit("plus_one", self.plus_one_);
    visit("eps", self.eps_);
    visit("values", self.values_);
  }
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
  at::Tensor weight, bias;  // [dim]
};
TORCH_MODULE(LayerNorm);

// "rms", "rms_plus_one" (an RMSNorm with plus_one) or "layer"; anything else raises.
Part<TokenModule> make_norm(const std::string& kind, const NormOptions& options);

}  // namespace attnpack
