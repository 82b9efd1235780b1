#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include <attnpack/layers/route_experts.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/leaf.h>
#include <attnpack/ops/option_list.h>

#include <optional>
#include <string>
#include <tuple>

namespace attnpack {

struct MixtureOfExpertsOptions : OptionList<MixtureOfExpertsOptions> {
  MixtureOfExpertsOptions(int64_t embed_dim, int64_t hidden_dim, int64_t num_experts, int64_t top_k)
      : embed_dim_(embed_dim), hidden_dim_(hidden_dim), num_experts_(num_experts), top_k_(top_k) {}
  ATTNPACK_OPTION(int64_t, embed_dim);
  ATTNPACK_OPTION(int64_t, hidden_dim);   // width inside each expert
  ATTNPACK_OPTION(int64_t, num_experts);  // of which each token takes top_k
  ATTNPACK_OPTION(int64_t, top_k);
  ATTNPACK_OPTION(std::string, scores) = "softmax";  // these five: see RouteOptions
  ATTNPACK_OPTION(bool, normalize) = false;
  ATTNPACK_OPTION(double, scaling) = 1.0;
  ATTNPACK_OPTION(int64_t, num_groups) = 1;
  ATTNPACK_OPTION(int64_t, top_groups) = 1;
  // Parameter gate.e_score_correction_bias [num_experts], 0 at first and frozen: it is set by a rule that balances the
  // load of the experts (DeepSeek-V3, 2024, section 2.1.2), and not by gradients.
  ATTNPACK_OPTION(bool, correction) = false;
  ATTNPACK_OPTION(bool, gate_bias) = false;
  ATTNPACK_OPTION(std::string, activation) = "swiglu";  // of the experts, as in FeedForward
  ATTNPACK_OPTION(bool, bias) = false;                  // of the experts
  ATTNPACK_OPTION(bool, weigh_inputs) = false;          // the weights multiply what goes into the experts (Llama 4)
  ATTNPACK_OPTION(std::optional<int64_t>, shared_dim);  // width inside an expert for all tokens; none: no such expert
  ATTNPACK_OPTION(bool, shared_gate) = false;  // sigmoid(shared_expert_gate(x)) is a factor on that expert (Qwen 2)
  ATTNPACK_OPTION(Factory, factory);
};

// Chooses experts for each token: a linear layer in fp32 (fp64 for fp64), then route_experts.
class ExpertGateImpl : public LeafModule<ExpertGateImpl> {
 public:
  explicit ExpertGateImpl(MixtureOfExpertsOptions given) : options(std::move(given)) { reset(); }

  // [T, embed_dim] -> weights [T, top_k] and int64 numbers [T, top_k] of experts
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x);

  void reset() override;
  void bind_members();
  void pretty_print(std::ostream& stream) const override { stream << "attnpack::ExpertGate"; }

  MixtureOfExpertsOptions options;
  at::Tensor weight, bias, e_score_correction_bias;  // [num_experts, embed_dim], [num_experts] twice; some undefined
};
TORCH_MODULE(ExpertGate);

// Each token goes through the top_k of num_experts feed-forwards that a gate chooses for it, and through a shared one
// if there is one (Shazeer et al. 2017; DeepSeekMoE, Dai et al. 2024). Children gate, experts and shared_experts.
class MixtureOfExpertsImpl : public torch::nn::Cloneable<MixtureOfExpertsImpl>, public TokenModule {
 public:
  MixtureOfExpertsImpl(int64_t embed_dim, int64_t hidden_dim, int64_t num_experts, int64_t top_k)
      : MixtureOfExpertsImpl(MixtureOfExpertsOptions(embed_dim, hidden_dim, num_experts, top_k)) {}
  explicit MixtureOfExpertsImpl(MixtureOfExpertsOptions given) : options(std::move(given)) { reset(); }

  at::Tensor forward(const at::Tensor& x) override;  // [..., embed_dim] -> [..., embed_dim]
  std::optional<int64_t> embed_dim() const override { return options.embed_dim(); }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  MixtureOfExpertsOptions options;
  ExpertGate gate{nullptr};
  torch::nn::ModuleList experts{nullptr};
  FeedForward shared_experts{nullptr};
  Linear shared_expert_gate{nullptr};
};
TORCH_MODULE(MixtureOfExperts);

}  // namespace attnpack
