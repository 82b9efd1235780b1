#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/layers/differential.h>
#include <attnpack/modules/attention_module.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/rotary_embedding.h>
#include <attnpack/ops/option_list.h>

#include <optional>

namespace attnpack {

struct DifferentialAttentionOptions : OptionList<DifferentialAttentionOptions> {
  DifferentialAttentionOptions(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads), num_kv_heads_(num_kv_heads) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  // As the published code counts them: query heads of version 1, outputs of version 2, which has two query heads each.
  ATTNPACK_OPTION(int64_t, num_heads);
  ATTNPACK_OPTION(int64_t, num_kv_heads);
  // 1 (Ye et al. 2024, arXiv 2410.05258; DiffLlama) or 2 (Ye et al. 2026).
  ATTNPACK_OPTION(int64_t, version) = 2;
  // Default embed_dim / num_heads.
  ATTNPACK_OPTION(std::optional<int64_t>, head_dim);
  // Only for version 1: the first value of lambda, 0.8 - 0.6 exp(-0.3 layer) in the paper; default 0.8.
  ATTNPACK_OPTION(std::optional<double>, lambda_init);
  // Only for version 1: eps of the norm on the differences; default 1e-5.
  ATTNPACK_OPTION(std::optional<double>, eps);
  ATTNPACK_OPTION(bool, bias) = false;
  // Default: as bias.
  ATTNPACK_OPTION(std::optional<bool>, out_bias);
  // Dropout of the probabilities of each query head, in training.
  ATTNPACK_OPTION(double, dropout) = 0.0;
  ATTNPACK_OPTION(bool, causal) = false;
  ATTNPACK_OPTION(std::optional<Window>, window);
  ATTNPACK_OPTION(double, softcap) = 0.0;
  ATTNPACK_OPTION(RotaryEmbedding, rope) = nullptr;
  // Default 1 / sqrt(head_dim).
  ATTNPACK_OPTION(std::optional<double>, scale);
  ATTNPACK_OPTION(Factory, factory);
};

// The difference of two softmaxes over the same values, in one call of the operator (layers/differential.h). Version 1:
// query heads h and h + num_heads / 2 are a pair, and a cache holds values of twice the width. Version 2: query heads
// 2 h and 2 h + 1 are one; lambda_proj gives each output head its factor.
class DifferentialAttentionImpl : public LeafModule<DifferentialAttentionImpl>, public AttentionModule {
 public:
  DifferentialAttentionImpl(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads)
      : DifferentialAttentionImpl(DifferentialAttentionOptions(embed_dim, num_heads, num_kv_heads)) {}
  explicit DifferentialAttentionImpl(DifferentialAttentionOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor> forward_with_weights(const at::Tensor& x,
                                                          const AttentionInputs& inputs = {}) override;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> project(const at::Tensor& x,
                                                         const AttentionInputs& inputs = {}) override;
  int64_t embed_dim() const override { return options.embed_dim(); }
  bool rotates() const override { return !rope.is_empty(); }
  bool counts_distances() const override { return options.window().value_or(Window{-1, -1}) != Window{-1, -1}; }
  const Factory& factory() const override { return options.factory(); }

  void reset() override;
  void bind_members();
  void pretty_print(std::ostream& stream) const override;

  DifferentialAttentionOptions options;
  Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  Linear lambda_proj{nullptr};                            // of version 2
  at::Tensor lambda_q1, lambda_k1, lambda_q2, lambda_k2;  // [head_dim], of version 1
  RotaryEmbedding rope{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})

 private:
  friend struct AttentionSteps;

  bool first() const { return options.version() == 1; }
  int64_t query_heads() const { return first() ? options.num_heads() : 2 * options.num_heads(); }
  at::Tensor queries(const at::Tensor& x, const AttentionInputs& inputs);
  // Not rotated.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> heads(const at::Tensor& x, const AttentionInputs& inputs);
  AttendOptions settings(const AttentionInputs& inputs) const;
  AttendOptions shared_settings(const at::Tensor& x, const AttentionInputs& inputs) const;
  at::Tensor output(const at::Tensor& joined, const at::Tensor& x);
};
TORCH_MODULE(DifferentialAttention);

}  // namespace attnpack
