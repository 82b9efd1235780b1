#include <attnpack/modules/feed_forward.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/activations.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/dropout.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/ops/swiglu.h>

namespace attnpack {

namespace {

at::Tensor activated(const std::string& activation, const at::Tensor& x) {
  if (activation == "relu") return at::relu(x);
  if (activation == "relu2") return at::relu(x).square();
  return at::gelu(x, activation.ends_with("_tanh") ? "tanh" : "none");
}

}  // namespace

bool has_gate(const std::string& activation) { return activation.ends_with("glu") || activation == "geglu_tanh"; }

at::Tensor gated_by(const std::string& activation, const at::Tensor& gate, const at::Tensor& up) {
  if (activation == "swiglu") return swiglu(gate, up);
  if (activation != "clamped_swiglu") return activated(activation, gate) * up;
  const double alpha = 1.702, limit = 7;  // of gpt-oss
  const auto g = gate.clamp_max(limit);
  return g * at::sigmoid(alpha * g) * (up.clamp(-limit, limit) + 1);
}

void FeedForwardImpl::reset() {
  const auto& o = options;
  check_activation(o.activation());
  check_size("embed_dim", o.embed_dim());
  check_size("hidden_dim", o.hidden_dim());
  check_dropout("dropout", o.dropout());
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, Linear(LinearOptions(in, out).bias(o.bias()).factory(o.factory())));
  };
  if (has_gate(o.activation())) gate_proj = linear("gate_proj", o.embed_dim(), o.hidden_dim());
  up_proj = linear("up_proj", o.embed_dim(), o.hidden_dim());
  down_proj = linear("down_proj", o.hidden_dim(), o.embed_dim());
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) {
  check_tokens("x", x, options.embed_dim(), up_proj->weight);
  const auto down = [this](const at::Tensor& inner) { return down_proj(dropped(inner, options.dropout(), *this)); };
  if (!gate_proj) return down(activated(options.activation(), up_proj(x)));
  const auto inner = forward_all(x, {gate_proj.get(), up_proj.get()});
  return down(gated_by(options.activation(), inner[0], inner[1]));
}

void FeedForwardImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::FeedForward", options);
}

}  // namespace attnpack
