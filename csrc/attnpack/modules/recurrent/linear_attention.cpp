#include <attnpack/modules/recurrent/linear_attention.h>

#include <attnpack/core/check.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/print_options.h>
#include <attnpack/modules/detail/recurrent.h>

namespace attnpack {

void LinearAttentionImpl::reset() {
  auto& o = options;
  check_size("embed_dim", o.embed_dim());
  check_size("num_heads", o.num_heads());
  check_size("decay_rank", o.decay_rank());
  check_settings(std::nullopt, 0.0, 0.0, o.scale());
  o.head_dim(resolve_head_dim(o.embed_dim(), o.num_heads(), o.head_dim()));
  check_linear_attend(o.feature_map(), o.decay());
  const auto width = o.num_heads() * *o.head_dim();
  const auto linear = [&](const char* name, int64_t in, int64_t out, bool bias) {
    return register_module(name, Linear(LinearOptions(in, out).bias(bias).factory(o.factory())));
  };
  q_proj = linear("q_proj", o.embed_dim(), width, o.bias());
  k_proj = linear("k_proj", o.embed_dim(), width, o.bias());
  v_proj = linear("v_proj", o.embed_dim(), width, o.bias());
  o_proj = linear("o_proj", width, o.embed_dim(), o.out_bias().value_or(o.bias()));
  if (o.decay() != "learned") return;
  decay_a_proj = linear("decay_a_proj", o.embed_dim(), o.decay_rank(), false);
  decay_b_proj = linear("decay_b_proj", o.decay_rank(), width, true);
}

at::Tensor LinearAttentionImpl::forward(const at::Tensor& x, const AttentionInputs& inputs) {
  const auto& o = options;
  check_input("x", x, o.embed_dim(), q_proj->weight);
  const auto dim = *o.head_dim(), columns = dim + (o.feature_map() == "elu" ? 1 : 0);
  return with_states(
      "LinearAttention", x, inputs, {{}, {o.num_heads(), dim, columns}}, [&](const RecurrentInputs& given) -> Recurred {
        const auto made = forward_all(x, {q_proj.get(), k_proj.get(), v_proj.get()});
        const auto logits = decay_a_proj ? std::make_optional(decay_b_proj(decay_a_proj(x))) : std::nullopt;
        const auto [out, state] = linear_attend(made[0], made[1], made[2], logits,
                                                {o.num_heads(), o.feature_map(), o.decay(), o.scale()}, given);
        return {o_proj(out), {{}, state}};
      });
}

void LinearAttentionImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "attnpack::LinearAttention", options);
}

}  // namespace attnpack
