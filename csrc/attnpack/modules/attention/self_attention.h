#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/attention_module.h>
#include <attnpack/modules/linear.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct SelfAttentionOptions : OptionList<SelfAttentionOptions> {
  explicit SelfAttentionOptions(int64_t embed_dim) : embed_dim_(embed_dim) {}
  SelfAttentionOptions(int64_t embed_dim, int64_t head_dim) : embed_dim_(embed_dim), head_dim_(head_dim) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(std::optional<int64_t>, head_dim);  // default embed_dim
  ATTNPACK_OPTION(bool, bias) = false;
  ATTNPACK_OPTION(bool, causal) = false;
  ATTNPACK_OPTION(Factory, factory);
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
