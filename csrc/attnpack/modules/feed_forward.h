#pragma once

#include <attnpack/modules/linear.h>
#include <attnpack/modules/part.h>
#include <attnpack/ops/option_list.h>

#include <string>

namespace attnpack {

struct FeedForwardOptions : OptionList<FeedForwardOptions> {
  FeedForwardOptions(int64_t embed_dim, int64_t hidden_dim) : embed_dim_(embed_dim), hidden_dim_(hidden_dim) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, hidden_dim);
  // With a gate "swiglu", "geglu", "geglu_tanh" or "clamped_swiglu", without one "gelu", "gelu_tanh" or "relu".
  ATTNPACK_OPTION(std::string, activation) = "swiglu";
  ATTNPACK_OPTION(bool, bias) = false;
  ATTNPACK_OPTION(double, dropout) = 0.0;  // of what goes into down, in training
  ATTNPACK_OPTION(Factory, factory);
};

// With a gate down(f(gate(x)) * up(x)) (Shazeer 2020), where f is silu for "swiglu", the exact gelu for "geglu" and its
// tanh form for "geglu_tanh" (Gemma). Without one down(f(up(x))): "gelu", "gelu_tanh" (GPT-2), "relu". For
// "clamped_swiglu" (gpt-oss), with g = min(gate(x), 7) and u = up(x) within -7 to 7: down(g sigmoid(1.702 g) (u + 1)).
class FeedForwardImpl : public torch::nn::Cloneable<FeedForwardImpl>, public TokenModule {
 public:
  FeedForwardImpl(int64_t embed_dim, int64_t hidden_dim) : FeedForwardImpl(FeedForwardOptions(embed_dim, hidden_dim)) {}
  explicit FeedForwardImpl(FeedForwardOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x) override;
  std::optional<int64_t> embed_dim() const override { return options.embed_dim(); }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  FeedForwardOptions options;
  Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(FeedForward);

}  // namespace attnpack
