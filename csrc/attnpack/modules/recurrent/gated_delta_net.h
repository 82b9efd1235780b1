#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/leaf.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/recurrent/short_convolution.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct GatedDeltaNetOptions : OptionList<GatedDeltaNetOptions> {
  GatedDeltaNetOptions(int64_t embed_dim, int64_t num_k_heads, int64_t num_v_heads)
      : embed_dim_(embed_dim), num_k_heads_(num_k_heads), num_v_heads_(num_v_heads) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_k_heads);  // heads of queries and keys, of which each serves num_v_heads / num_k_heads
  ATTNPACK_OPTION(int64_t, num_v_heads);  // heads of values, each with a state
  // Required, as is head_v_dim.
  ATTNPACK_OPTION(std::optional<int64_t>, head_k_dim);
  ATTNPACK_OPTION(std::optional<int64_t>, head_v_dim);
  ATTNPACK_OPTION(int64_t, conv_kernel_size) = 4;
  ATTNPACK_OPTION(double, norm_eps) = 1e-6;
  // Whether beta goes up to 2, so that a state may have negative eigenvalues (Grazzi et al. 2024, arXiv 2411.12537).
  ATTNPACK_OPTION(bool, allow_neg_eigval) = false;
  ATTNPACK_OPTION(Factory, factory);
};

// Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464): layers/recurrent.h. Parameter names, shapes and row
// order are those of Qwen3.5's layers in transformers.
class GatedDeltaNetImpl : public LeafModule<GatedDeltaNetImpl>, public RecurrentModule {
 public:
  explicit GatedDeltaNetImpl(GatedDeltaNetOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;  // [B, L, E] -> [B, L, E]
  int64_t embed_dim() const override { return options.embed_dim(); }
  const Factory& factory() const override { return options.factory(); }

  void reset() override;
  void bind_members();
  void pretty_print(std::ostream& stream) const override;

  GatedDeltaNetOptions options;
  ShortConvolution conv1d{nullptr};
  at::Tensor dt_bias, A_log;  // [num_v_heads]
  RMSNorm norm{nullptr};
  Linear out_proj{nullptr}, in_proj_qkv{nullptr}, in_proj_z{nullptr}, in_proj_b{nullptr}, in_proj_a{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})
};
TORCH_MODULE(GatedDeltaNet);

}  // namespace attnpack
