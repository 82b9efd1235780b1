#include <attnpack/modules/layer_tail.h>

#include <ATen/ATen.h>

#include <cmath>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/activations.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>

namespace attnpack {

void LayerTailImpl::reset() {
  const auto& o = options;
  check_size("embed_dim", o.embed_dim());
  check_activation(o.activation());
  ATTNPACK_CHECK(has_gate(o.activation()), "activation: got '", o.activation(), "', want one with a gate");
  register_parameter("scalar", allocate("scalar", {1}, scalar, o.factory()).fill_(1), /*requires_grad=*/false);
  bind_members();
  if (!o.input_dim()) return;
  check_size("input_dim", *o.input_dim());
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, Linear(LinearOptions(in, out).factory(o.factory())));
  };
  gate = linear("gate", o.embed_dim(), *o.input_dim());
  projection = linear("projection", *o.input_dim(), o.embed_dim());
  norm = register_module("norm", RMSNorm(RMSNormOptions(o.embed_dim()).eps(o.eps()).factory(o.factory())));
}

at::Tensor LayerTailImpl::forward(const at::Tensor& x, const std::optional<at::Tensor>& input) {
  check_tokens("x", x, options.embed_dim(), {});
  check_layer_input(input.has_value(), options.input_dim().has_value());
  if (!input) return x * scalar;
  return (x + norm(projection(gated_by(options.activation(), gate(x), *input)))) * scalar;
}

void LayerTailImpl::pretty_print(std::ostream& stream) const { print_options(stream, "attnpack::LayerTail", options); }

void LayerInputTableImpl::reset() {
  const auto& o = options;
  check_size("embed_dim", o.embed_dim());
  check_size("num_layers", o.num_layers());
  check_size("input_dim", o.input_dim());
  const auto width = o.num_layers() * o.input_dim();
  embed_tokens =
      register_module("embed_tokens", Embedding(EmbeddingOptions(o.vocab_size(), width).factory(o.factory())));
  model_projection =
      register_module("model_projection", Linear(LinearOptions(o.embed_dim(), width).factory(o.factory())));
  projection_norm =
      register_module("projection_norm", RMSNorm(RMSNormOptions(o.input_dim()).eps(o.eps()).factory(o.factory())));
}

at::Tensor LayerInputTableImpl::forward(const at::Tensor& ids, const at::Tensor& embedding) {
  const auto by_layer = [this](const at::Tensor& t) {
    return t.unflatten(-1, {options.num_layers(), options.input_dim()});
  };
  const auto projected = model_projection(embedding) / std::sqrt(static_cast<double>(options.embed_dim()));
  const auto rows = embed_tokens->look_up("ids", ids).to(embedding.scalar_type());  // stored rows come in fp32
  // rounded to its dtype, as the factor on the embeddings
  const auto factor =
      at::full({}, std::sqrt(static_cast<double>(options.input_dim())), rows.options().requires_grad(false));
  return (projection_norm(by_layer(projected)) + by_layer(rows * factor)) * std::sqrt(0.5);
}

void LayerInputTableImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::LayerInputTable", options);
}

}  // namespace attnpack
