#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/leaf.h>
#include <attnpack/modules/linear.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/recurrent/short_convolution.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct Mamba2Options : OptionList<Mamba2Options> {
  Mamba2Options(int64_t embed_dim, int64_t num_heads) : embed_dim_(embed_dim), num_heads_(num_heads) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_heads);  // heads of values, each with a state
  // Required, as is state_dim.
  ATTNPACK_OPTION(std::optional<int64_t>, head_dim);   // width of a head's values
  ATTNPACK_OPTION(std::optional<int64_t>, state_dim);  // width of queries and keys (C and B in the paper)
  ATTNPACK_OPTION(int64_t, num_groups) = 1;            // heads of queries and keys, each for num_heads / num_groups
  ATTNPACK_OPTION(int64_t, conv_kernel_size) = 4;
  ATTNPACK_OPTION(bool, conv_bias) = true;
  ATTNPACK_OPTION(bool, bias) = false;  // on both projections
  ATTNPACK_OPTION(double, norm_eps) = 1e-5;
  ATTNPACK_OPTION(Factory, factory);
};

// Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): layers/recurrent.h. Parameter names, shapes and row order are those of
// Mamba2Mixer in transformers, which Bamba and Granite 4 have too.
class Mamba2Impl : public LeafModule<Mamba2Impl>, public RecurrentModule {
 public:
  explicit Mamba2Impl(Mamba2Options given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;  // [B, L, E] -> [B, L, E]
  int64_t embed_dim() const override { return options.embed_dim(); }
  const Factory& factory() const override { return options.factory(); }

  void reset() override;
  void bind_members();
  void pretty_print(std::ostream& stream) const override;

  Mamba2Options options;
  ShortConvolution conv1d{nullptr};
  Linear in_proj{nullptr};
  at::Tensor dt_bias, A_log, D;  // [num_heads]
  RMSNorm norm{nullptr};         // each of num_groups parts of the heads by itself
  Linear out_proj{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})
};
TORCH_MODULE(Mamba2);

}  // namespace attnpack
