#include <attnpack/modules/attention/differential_attention.h>

#include <torch/nn/init.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/heads.h>
#include <attnpack/modules/detail/print_options.h>

#include <cmath>

namespace attnpack {

namespace {

void check_options(const DifferentialAttentionOptions& o) {
  check_settings(o.window(), o.softcap(), o.dropout(), o.scale());
  check_size("embed_dim", o.embed_dim());
  check_heads(o.num_heads(), o.num_kv_heads(), std::nullopt);
  ATTNPACK_CHECK(o.version() == 1 || o.version() == 2, "version: got ", o.version(), ", want 1 or 2");
  const bool first = o.version() == 1;
  ATTNPACK_CHECK(!first || (o.num_heads() % 2 == 0 && o.num_kv_heads() % 2 == 0), "num_heads, num_kv_heads: got ",
                 o.num_heads(), " and ", o.num_kv_heads(), ", version 1 wants even numbers, because two are a pair");
  ATTNPACK_CHECK(first || (!o.lambda_init() && !o.eps()),
                 "lambda_init, eps: got one for version 2, which has neither; ", "leave it out, or take version 1");
  ATTNPACK_CHECK(std::isfinite(o.lambda_init().value_or(0)), "lambda_init: got ", o.lambda_init().value_or(0),
                 ", want a finite number such as 0.8");
  ATTNPACK_CHECK(o.eps().value_or(0) >= 0 && std::isfinite(o.eps().value_or(0)), "eps: got ", o.eps().value_or(0),
                 ", want a small number such as 1e-5");
}

}  // namespace

void DifferentialAttentionImpl::reset() {
  auto& o = options;
  check_options(o);
  o.head_dim(resolve_head_dim(o.embed_dim(), o.num_heads(), o.head_dim()));
  const auto dim = *o.head_dim();
  const auto linear = [&](const char* name, int64_t in, int64_t out, bool bias) {
    return register_module(name, Linear(LinearOptions(in, out).bias(bias).factory(o.factory())));
  };
  q_proj = linear("q_proj", o.embed_dim(), query_heads() * dim, o.bias());
  k_proj = linear("k_proj", o.embed_dim(), o.num_kv_heads() * dim, o.bias());
  v_proj = linear("v_proj", o.embed_dim(), o.num_kv_heads() * dim, o.bias());
  o_proj = linear("o_proj", o.num_heads() * dim, o.embed_dim(), o.out_bias().value_or(o.bias()));
  if (first()) {
    o.lambda_init(o.lambda_init().value_or(0.8)).eps(o.eps().value_or(1e-5));
    const double deviation = 0.1;  // of the paper, section 2.1
    for (const auto& [name, parameter] : {std::pair{"lambda_q1", &lambda_q1}, std::pair{"lambda_k1", &lambda_k1},
                                          std::pair{"lambda_q2", &lambda_q2}, std::pair{"lambda_k2", &lambda_k2}}) {
      const auto made = register_parameter(name, allocate("head_dim", {dim}, *parameter, o.factory()));
      if (!made.is_meta()) torch::nn::init::normal_(made, 0, deviation);
    }
  } else {
    lambda_proj = linear("lambda_proj", o.embed_dim(), o.num_heads(), false);
  }
  bind_members();
  if (o.rope()) {
    check_rope_dim(o.rope(), dim, text_of({"head_dim ", dim}));
    rope = register_module("rope", RotaryEmbedding(o.rope()->options));
  }
}

void DifferentialAttentionImpl::bind_members() {
  if (!first()) return;
  lambda_q1 = parameters_["lambda_q1"], lambda_k1 = parameters_["lambda_k1"];
  lambda_q2 = parameters_["lambda_q2"], lambda_k2 = parameters_["lambda_k2"];
}

at::Tensor DifferentialAttentionImpl::queries(const at::Tensor& x, const AttentionInputs&) {
  return split_heads(q_proj(x), query_heads(), *options.head_dim());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> DifferentialAttentionImpl::heads(const at::Tensor& x,
                                                                                const AttentionInputs& inputs) {
  const auto& context = inputs.context() ? *inputs.context() : x;
  const auto& value_context = inputs.value_context() ? *inputs.value_context() : context;
  const ProjectionInput input{options.embed_dim(), q_proj->weight};
  const auto cross = cross_cache(inputs);
  if (cross) cross->check_call(x, inputs.context());
  if (cross && cross->filled()) {
    check_input("x", x, options.embed_dim(), q_proj->weight);
    return {queries(x, inputs), cross->k(), cross->v()};
  }
  check_inputs(x, inputs.context(), inputs.value_context(), inputs.cache() && !cross, input, input, input);
  const bool self = !inputs.context() && !inputs.value_context();
  const auto made = self ? forward_all(x, {q_proj.get(), k_proj.get(), v_proj.get()})
                         : std::vector<at::Tensor>{q_proj(x), k_proj(context), v_proj(value_context)};
  const auto dim = *options.head_dim(), kv_heads = options.num_kv_heads();
  const auto value = split_heads(made[2], kv_heads, dim);
  return {split_heads(made[0], query_heads(), dim), split_heads(made[1], kv_heads, dim),
          first() ? pair_values(value) : value};
}

AttendOptions DifferentialAttentionImpl::settings(const AttentionInputs& inputs) const {
  return attend_options(options, inputs, is_training(), rope);
}

AttendOptions DifferentialAttentionImpl::shared_settings(const at::Tensor& x, const AttentionInputs& inputs) const {
  check_input("x", x, options.embed_dim(), q_proj->weight);
  auto result = settings(inputs);
  const auto dim = *options.head_dim();
  result.cache = keys_of_kv_from(inputs, x, options.num_kv_heads(), dim, first() ? 2 * dim : dim);
  return result;
}

at::Tensor DifferentialAttentionImpl::output(const at::Tensor& joined, const at::Tensor& x) {
  if (!first()) return o_proj(subtract_pairs(joined, lambda_proj(x)));
  const DifferentialLambdas lambdas{lambda_q1, lambda_k1, lambda_q2, lambda_k2};
  return o_proj(subtract_halves(joined, options.num_heads(), lambdas, *options.lambda_init(), *options.eps()));
}

at::Tensor DifferentialAttentionImpl::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  return AttentionSteps::forward(*this, x, inputs);
}

std::tuple<at::Tensor, at::Tensor> DifferentialAttentionImpl::forward_with_weights(const at::Tensor& x,
                                                                                   const AttentionInputs& inputs) {
  return AttentionSteps::forward_with_weights(*this, x, inputs);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> DifferentialAttentionImpl::project(const at::Tensor& x,
                                                                                  const AttentionInputs& inputs) {
  return AttentionSteps::project(*this, x, inputs);
}

void DifferentialAttentionImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::DifferentialAttention", options);
}

}  // namespace attnpack
