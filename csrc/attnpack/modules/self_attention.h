#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/attention_module.h>
#include <attnpack/modules/linear.h>

namespace attnpack {

struct SelfAttentionOptions {
  explicit SelfAttentionOptions(int64_t embed_dim) : embed_dim_(embed_dim) {}
  SelfAttentionOptions(int64_t embed_dim, int64_t head_dim) : embed_dim_(embed_dim), head_dim_(head_dim) {}
  TORCH_ARG(int64_t, embed_dim);
  TORCH_ARG(std::optional<int64_t>, head_dim);  // default embed_dim
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(bool, causal) = false;
  TORCH_ARG(Factory, factory);

 public:
  template <typename Self, typename Visit>
  static void for_each_option(Self& self, const Visit& visit) {
    visit("embed_dim", self.embed_dim_);
    visit("head_dim", self.head_dim_);
    visit("bias", self.bias_);
    visit("causal", self.causal_);
    visit("factory", self.factory_);
  }
};

// One head and no output projection: x [B, L, E] -> [B, L, head_dim]. (Vaswani et al. 2017, section 3.2.1.)
class SelfAttentionImpl : public torch::nn::Cloneable<SelfAttentionImpl>, public AttentionModule {
 public:
  explicit SelfAttentionImpl(int64_t embed_dim) : SelfAttentionImpl(SelfAttentionOptions(embed_dim)) {}
  SelfAttentionImpl(int64_t embed_dim, int64_t head_dim)
      : SelfAttentionImpl(SelfAttentionOptions(embed_dim, head_dim)) {}
  explicit SelfAttentionImpl(SelfAttentionOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& x,
                                                          const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> project(const at::Tensor& x,
                                                         const AttentionInputs& inputs = {}) override;
  int64_t embed_dim() const override { return options.embed_dim(); }
  int64_t out_dim() const override { return *options.head_dim(); }
  bool rotates() const override { return false; }
  const Factory& factory() const override { return options.factory(); }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  SelfAttentionOptions options;
  Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})
};
TORCH_MODULE(SelfAttention);

}  // namespace attnpack
