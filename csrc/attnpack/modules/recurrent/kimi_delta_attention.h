#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/leaf.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/recurrent/short_convolution.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct ForgetGateOptions : OptionList<ForgetGateOptions> {
  ForgetGateOptions(int64_t embed_dim, int64_t num_heads, int64_t head_dim)
      : embed_dim_(embed_dim), num_heads_(num_heads), head_dim_(head_dim) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_heads);
  ATTNPACK_OPTION(int64_t, head_dim);
  ATTNPACK_OPTION(Factory, factory);
};

// Computes the logits of the decays of a KimiDeltaAttention.
class ForgetGateImpl : public LeafModule<ForgetGateImpl> {
 public:
  explicit ForgetGateImpl(ForgetGateOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x);  // [B, L, E] -> [B, L, num_heads * head_dim], without dt_bias and A_log

  void reset() override;
  void bind_members();
  void pretty_print(std::ostream& stream) const override;

  ForgetGateOptions options;
  Linear f_a_proj{nullptr}, f_b_proj{nullptr};
  at::Tensor dt_bias;  // [num_heads * head_dim]
  at::Tensor A_log;    // [1, 1, num_heads, 1]
};
TORCH_MODULE(ForgetGate);

struct KimiDeltaAttentionOptions : OptionList<KimiDeltaAttentionOptions> {
  KimiDeltaAttentionOptions(int64_t embed_dim, int64_t num_heads) : embed_dim_(embed_dim), num_heads_(num_heads) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_heads);
  ATTNPACK_OPTION(std::optional<int64_t>, head_dim);  // required
  ATTNPACK_OPTION(int64_t, conv_kernel_size) = 4;
  ATTNPACK_OPTION(double, norm_eps) = 1e-6;
  ATTNPACK_OPTION(Factory, factory);
};

// Kimi Delta Attention (Kimi Linear 2025, arXiv 2510.26692): Gated DeltaNet with a decay per channel, and a gate by
// sigmoid (layers/recurrent.h). Parameter names, shapes and row order are those of Kimi-Linear's layers in
// transformers.
class KimiDeltaAttentionImpl : public torch::nn::Cloneable<KimiDeltaAttentionImpl>, public RecurrentModule {
 public:
  explicit KimiDeltaAttentionImpl(KimiDeltaAttentionOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;  // [B, L, E] -> [B, L, E]
  int64_t embed_dim() const override { return options.embed_dim(); }
  const Factory& factory() const override { return options.factory(); }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  KimiDeltaAttentionOptions options;
  Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr};
  ShortConvolution conv1d{nullptr};
  ForgetGate forget_gate{nullptr};
  Linear b_proj{nullptr}, g_a_proj{nullptr}, g_b_proj{nullptr};
  RMSNorm o_norm{nullptr};
  Linear o_proj{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})
};
TORCH_MODULE(KimiDeltaAttention);

}  // namespace attnpack
