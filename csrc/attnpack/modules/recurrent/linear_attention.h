#pragma once

#include <torch/nn/pimpl.h>

#include <attnpack/modules/linear.h>
#include <attnpack/modules/recurrent/recurrent_module.h>
#include <attnpack/ops/option_list.h>

namespace attnpack {

struct LinearAttentionOptions : OptionList<LinearAttentionOptions> {
  LinearAttentionOptions(int64_t embed_dim, int64_t num_heads) : embed_dim_(embed_dim), num_heads_(num_heads) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, num_heads);
  ATTNPACK_OPTION(std::optional<int64_t>, head_dim);  // default embed_dim / num_heads
  // "identity", or "elu": elu(x) + 1 of queries and keys, and outputs divided by the sum of their weights.
  ATTNPACK_OPTION(std::string, feature_map) = "identity";
  // "none"; "fixed", a number for each head as in RetNet; "learned", per channel as in GLA.
  ATTNPACK_OPTION(std::string, decay) = "none";
  ATTNPACK_OPTION(int64_t, decay_rank) = 16;  // of the two projections that make a learned decay
  ATTNPACK_OPTION(bool, bias) = false;
  ATTNPACK_OPTION(std::optional<bool>, out_bias);  // default: as bias
  ATTNPACK_OPTION(std::optional<double>, scale);   // default 1 / sqrt(head_dim); 1 with a feature map
  ATTNPACK_OPTION(Factory, factory);
};

// Attention without the softmax: the state of a head is the sum of the outer products of its keys and values
// (Katharopoulos et al. 2020, arXiv 2006.16236; layers/recurrent.h).
class LinearAttentionImpl : public torch::nn::Cloneable<LinearAttentionImpl>, public RecurrentModule {
 public:
  LinearAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : LinearAttentionImpl(LinearAttentionOptions(embed_dim, num_heads)) {}
  explicit LinearAttentionImpl(LinearAttentionOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x, const AttentionInputs& inputs = {}) override;  // [B, L, E] -> [B, L, E]
  int64_t embed_dim() const override { return options.embed_dim(); }
  const Factory& factory() const override { return options.factory(); }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  LinearAttentionOptions options;
  Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  Linear decay_a_proj{nullptr}, decay_b_proj{nullptr};  // of a learned decay

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionInputs())})
};
TORCH_MODULE(LinearAttention);

}  // namespace attnpack
