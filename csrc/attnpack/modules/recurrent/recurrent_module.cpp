#include <attnpack/modules/recurrent/recurrent_module.h>

#include <ATen/ATen.h>

#include <attnpack/core/check.h>
#include <attnpack/layers/sharded_attention.h>
#include <attnpack/modules/detail/checks.h>
#include <attnpack/modules/detail/recurrent.h>

#include <cmath>

namespace attnpack {

std::tuple<at::Tensor, at::Tensor> RecurrentModule::forward_with_weights(const at::Tensor&, const AttentionInputs&) {
  ATTNPACK_CHECK(false, "need_weights: got true, but a recurrent layer has no probabilities; leave it out");
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> RecurrentModule::project(const at::Tensor&, const AttentionInputs&) {
  ATTNPACK_CHECK(false, "project: a recurrent layer has no heads that enter the operator of attention; call its ",
                 "projections");
}

void check_recurrent_call(const char* module, bool context, bool mask, bool not_causal, bool kv_from, bool key_index) {
  const auto refuse = [&](bool given, const char* name, const char* why) {
    ATTNPACK_CHECK(!given, name, ": got one for ", module, ", ", why);
  };
  refuse(context, "context", "which reads its own input; leave it out, or take a layer of attention");
  refuse(mask, "mask", "which has no scores to mask; leave it out, and say by kv_lens where padding begins");
  ATTNPACK_CHECK(!not_causal, "causal: got false for ", module, ", which reads its tokens in order; leave it out");
  refuse(kv_from, "kv_from", "which reads no keys; leave it out");
  refuse(key_index, "key_index", "which reads no keys; leave it out");
}

at::Tensor with_states(const char* module, const at::Tensor& x, const AttentionInputs& inputs,
                       const StateShapes& shapes, const std::function<Recurred(const RecurrentInputs&)>& call) {
  check_recurrent_call(module, inputs.context() || inputs.value_context(), inputs.mask().has_value(),
                       !inputs.causal().value_or(true), inputs.kv_from() != nullptr, inputs.key_index().has_value());
  check_no_index_cache(inputs.index_cache() != nullptr);
  check_no_key_block(inputs.key_block());
  refuse_context_parallel("a recurrent layer was called", "call it outside, on whole sequences");
  RecurrentInputs given;
  given.kv_lens(inputs.kv_lens()).cu_seqlens(inputs.cu_seqlens());
  if (!inputs.cache()) return call(given).out;
  const auto cache = std::dynamic_pointer_cast<RecurrentCache>(inputs.cache());
  ATTNPACK_CHECK(cache, "cache: got one for keys and values for ", module, ", want a RecurrentCache");
  const auto& ends = inputs.cu_seqlens();
  const auto stored = cache->states(ends ? ends->sym_size(0) - 1 : x.sym_size(0), shapes.conv, shapes.state);
  if (stored.conv.defined()) given.conv_state(stored.conv);
  if (stored.state.defined())
    given.state(stored.state).in_place(cache->writes_in_place() && !at::GradMode::is_enabled());
  return rollback_on_error(std::array{cache}, [&] {
    const auto result = call(given);
    cache->advance(result.states, x.sym_size(1), ends ? std::make_optional(ends->diff()) : inputs.kv_lens());
    return result.out;
  });
}

int64_t required_size(const char* name, const std::optional<int64_t>& size) {
  ATTNPACK_CHECK(size, name, ": got none, want the width of a head");
  check_size(name, *size);
  return *size;
}

at::Tensor log_of_uniform_(const at::Tensor& made, double least, double most) {
  return made.is_meta() ? made : made.uniform_(least, most).log_();
}

at::Tensor set_first_steps_(const at::Tensor& dt_bias) {
  if (dt_bias.is_meta()) return dt_bias;
  dt_bias.uniform_(std::log(0.001), std::log(0.1)).exp_();
  return dt_bias.add_((-(-dt_bias).expm1()).log());  // softplus(x + log(1 - exp(-x))) = x
}

}  // namespace attnpack
