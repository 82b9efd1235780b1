#include <attnpack/modules/mixture_of_experts.h>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <cmath>

#include <torch/nn/init.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>

namespace attnpack {

namespace {

RouteOptions route_options(const MixtureOfExpertsOptions& o) {
  return {o.scores(), o.top_k(), o.normalize(), o.scaling(), o.num_groups(), o.top_groups()};
}

}  // namespace

void ExpertGateImpl::reset() {
  const auto& o = options;
  register_parameter("weight",
                     allocate("num_experts and embed_dim", {o.num_experts(), o.embed_dim()}, weight, o.factory()));
  if (o.gate_bias()) register_parameter("bias", allocate("num_experts", {o.num_experts()}, bias, o.factory()).zero_());
  if (o.correction()) {
    const auto zeros = allocate("num_experts", {o.num_experts()}, e_score_correction_bias, o.factory()).zero_();
    register_parameter("e_score_correction_bias", zeros, /*requires_grad=*/false);
  }
  bind_members();
  if (weight.is_meta()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(o.embed_dim()));  // as a Linear's
  torch::nn::init::uniform_(weight, -bound, bound);
}

void ExpertGateImpl::bind_members() {
  weight = parameters_["weight"];
  bias = options.gate_bias() ? parameters_["bias"] : at::Tensor();
  e_score_correction_bias = options.correction() ? parameters_["e_score_correction_bias"] : at::Tensor();
}

std::tuple<at::Tensor, at::Tensor> ExpertGateImpl::forward(const at::Tensor& x) {
  const auto wide = at::toOpMathType(x.scalar_type());
  const auto given = [&](const at::Tensor& t) { return t.defined() ? std::make_optional(t.to(wide)) : std::nullopt; };
  return route_experts(at::linear(x.to(wide), weight.to(wide), given(bias)), given(e_score_correction_bias),
                       route_options(options));
}

void MixtureOfExpertsImpl::reset() {
  const auto& o = options;
  check_size("embed_dim", o.embed_dim());
  check_size("hidden_dim", o.hidden_dim());
  check_size("num_experts", o.num_experts());
  check_size("shared_dim", o.shared_dim().value_or(1));
  ATTNPACK_CHECK(std::isfinite(o.scaling()), "scaling: got ", o.scaling(), ", want a finite number");
  check_route(route_options(o), o.num_experts());
  gate = register_module("gate", ExpertGate(o));
  const auto expert = [&](int64_t hidden_dim) {
    return FeedForward(
        FeedForwardOptions(o.embed_dim(), hidden_dim).activation(o.activation()).bias(o.bias()).factory(o.factory()));
  };
  experts = register_module("experts", torch::nn::ModuleList());
  for (int64_t i = 0; i < o.num_experts(); ++i) experts->push_back(expert(o.hidden_dim()));
  if (o.shared_dim()) shared_experts = register_module("shared_experts", expert(*o.shared_dim()));
  ATTNPACK_CHECK(!o.shared_gate() || o.shared_dim(), "shared_gate: got True without shared_dim; give the width of the ",
                 "expert that it is a factor on too");
  if (o.shared_gate())
    shared_expert_gate =
        register_module("shared_expert_gate", Linear(LinearOptions(o.embed_dim(), 1).bias(false).factory(o.factory())));
}

at::Tensor MixtureOfExpertsImpl::forward(const at::Tensor& x) {
  check_tokens("x", x, options.embed_dim(), gate->weight);
  const auto rows = x.reshape({-1, options.embed_dim()});
  const auto [weights, index] = gate->forward(rows);
  // Choices in the order of their experts: choice c is one of token c / top_k.
  const auto chosen = index.flatten(), flat_weights = weights.flatten();
  const auto order = chosen.argsort(/*stable=*/true, 0);
  const bool meta = x.is_meta();  // which knows no choice
  const auto counts =
      meta ? at::zeros({options.num_experts()}, at::kLong) : chosen.bincount({}, options.num_experts()).cpu();
  auto out = at::zeros_like(rows);
  int64_t begin = 0;
  for (int64_t e = 0; e < options.num_experts(); ++e) {
    const auto count = counts.const_data_ptr<int64_t>()[e];
    if (count == 0) continue;
    const auto choices = order.narrow(0, begin, count);
    const auto tokens = choices.floor_divide(options.top_k());
    const auto weight = flat_weights.index_select(0, choices).unsqueeze(-1);
    const auto scaled = [&](bool here, const at::Tensor& t) { return here ? (t * weight).to(out.scalar_type()) : t; };
    const auto made =
        experts->ptr<FeedForwardImpl>(e)->forward(scaled(options.weigh_inputs(), rows.index_select(0, tokens)));
    out = out.index_add(0, tokens, scaled(!options.weigh_inputs(), made));
    begin += count;
  }
  out = out.view_as(x);
  if (!shared_experts) return out;
  const auto shared = shared_experts(x);
  return out + (shared_expert_gate ? shared_expert_gate(x).sigmoid() * shared : shared);
}

void MixtureOfExpertsImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::MixtureOfExperts", options);
}

}  // namespace attnpack
