#include <attnpack/modules/attention/self_attention.h>

#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/heads.h>
#include <attnpack/modules/detail/print_options.h>

namespace attnpack {

void SelfAttentionImpl::reset() {
  check_size("embed_dim", options.embed_dim());
  const auto head_dim = resolve_head_dim(options.embed_dim(), 1, options.head_dim());
  options.head_dim(head_dim);
  const auto linear = [&](const char* name) {
    return register_module(
        name, Linear(LinearOptions(options.embed_dim(), head_dim).bias(options.bias()).factory(options.factory())));
  };
  q_proj = linear("q_proj");
  k_proj = linear("k_proj");
  v_proj = linear("v_proj");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> SelfAttentionImpl::project(const at::Tensor& x,
                                                                          const AttentionInputs& inputs) {
  const auto& context = inputs.context() ? *inputs.context() : x;
  const auto& value_context = inputs.value_context() ? *inputs.value_context() : context;
  const auto input_of = [](const Linear& layer) {
    return ProjectionInput{layer->options.in_features(), layer->weight};
  };
  check_no_kv_from("SelfAttention", inputs.kv_from() != nullptr);
  const auto cross = cross_cache(inputs);
  if (cross) cross->check_call(x, inputs.context());
  if (cross && cross->filled()) {
    check_input("x", x, q_proj->options.in_features(), q_proj->weight);
    return {q_proj(x).unsqueeze(1), cross->k(), cross->v()};
  }
  check_inputs(x, inputs.context(), inputs.value_context(), inputs.cache() && !cross, input_of(q_proj),
               input_of(k_proj), input_of(v_proj));
  return {q_proj(x).unsqueeze(1), k_proj(context).unsqueeze(1), v_proj(value_context).unsqueeze(1)};
}

at::Tensor SelfAttentionImpl::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  auto [q, k, v] = project(x, inputs);
  return with_cache(inputs.cache(), k, v, AttendOptions{layer_inputs(inputs, options.causal())},
                    [&, &q = q, &k = k, &v = v](const AttendOptions& o) { return attend(q, k, v, o); });
}

std::tuple<at::Tensor, at::Tensor> SelfAttentionImpl::forward_with_weights(const at::Tensor& x,
                                                                           const AttentionInputs& inputs) {
  auto [q, k, v] = project(x, inputs);
  return with_cache(inputs.cache(), k, v, AttendOptions{layer_inputs(inputs, options.causal())},
                    [&, &q = q, &k = k, &v = v](const AttendOptions& o) { return attend_with_weights(q, k, v, o); });
}

void SelfAttentionImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::SelfAttention", options);
}

}  // namespace attnpack
