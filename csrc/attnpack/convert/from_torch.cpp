#include <attnpack/convert/from_torch.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <attnpack/convert/fused.h>
#include <attnpack/core/check.h>
#include <attnpack/modules/feed_forward.h>
#include <attnpack/modules/state_dict.h>

namespace attnpack::convert {

namespace {

// Puts copies of torch's parameters, by the names that they have in `made`, into `made`.
void fill(torch::nn::Module& made, StateDict tensors) {
  std::map<std::string, bool> trained;
  for (auto& [name, tensor] : tensors) {
    trained[name] = tensor.requires_grad();
    tensor = tensor.detach().clone();
  }
  assign_state_dict(made, tensors);
  for (auto& item : made.named_parameters()) item.value().set_requires_grad(trained.at(item.key()));
}

Factory factory_of(const at::Tensor& weight) { return {weight.device(), weight.scalar_type()}; }
// A module is made on meta, because its parameters are replaced.
Factory blank(const at::Tensor& weight) { return {at::kMeta, weight.scalar_type()}; }

void put(StateDict& state, const std::string& name, const at::Tensor& tensor) {
  if (tensor.defined()) state[name] = tensor;
}

// A part of torch's fused weight or bias. It asks for gradients where the whole does.
at::Tensor part_of(const at::Tensor& whole, const at::Tensor& part) {
  return part.detach().requires_grad_(whole.requires_grad());
}

// The parameters of torch's attention under `prefix`.
void put_attention(StateDict& state, const std::string& prefix, const torch::nn::MultiheadAttentionImpl& m) {
  const auto heads = m.options.num_heads();
  const auto put_fused = [&](const at::Tensor& whole, const std::string& kind) {
    if (!whole.defined()) return;
    const auto [q, k, v] = split_qkv(whole.detach(), "concat", heads, heads);
    state[prefix + "q_proj." + kind] = part_of(whole, q);
    state[prefix + "k_proj." + kind] = part_of(whole, k);
    state[prefix + "v_proj." + kind] = part_of(whole, v);
  };
  if (m._qkv_same_embed_dim) {
    put_fused(m.in_proj_weight, "weight");
  } else {
    state[prefix + "q_proj.weight"] = m.q_proj_weight;
    state[prefix + "k_proj.weight"] = m.k_proj_weight;
    state[prefix + "v_proj.weight"] = m.v_proj_weight;
  }
  put_fused(m.in_proj_bias, "bias");
  state[prefix + "o_proj.weight"] = m.out_proj->weight;
  put(state, prefix + "o_proj.bias", m.out_proj->bias);
}

MultiHeadAttention attention_like(const torch::nn::MultiheadAttentionImpl& m) {
  const auto& o = m.options;
  ATTNPACK_CHECK(!o.add_bias_kv(), "add_bias_kv: got a module with it, which attnpack does not have; want one without");
  ATTNPACK_CHECK(!o.add_zero_attn(),
                 "add_zero_attn: got a module with it, which attnpack does not have; want one without");
  auto options = MultiHeadAttentionOptions(o.embed_dim(), o.num_heads())
                     .bias(o.bias())
                     .out_bias(m.out_proj->bias.defined())
                     .dropout(o.dropout())
                     .factory(blank(m.out_proj->weight));
  if (!m._qkv_same_embed_dim) options.kdim(m.k_proj_weight.size(1)).vdim(m.v_proj_weight.size(1));
  MultiHeadAttention made(options);
  made->options.factory(factory_of(m.out_proj->weight));
  return made;
}

std::string activation_name(const torch::nn::activation_t& activation) {
  ATTNPACK_CHECK(!std::holds_alternative<std::function<at::Tensor(const at::Tensor&)>>(activation),
                 "activation: got a function, want torch::kReLU or torch::kGELU");
  return std::holds_alternative<torch::enumtype::kReLU>(activation) ? "relu" : "gelu";
}

template <typename Layer>
FeedForward feed_forward_like(const Layer& m) {
  const auto& o = m.options;
  FeedForward made(FeedForwardOptions(o.d_model(), o.dim_feedforward())
                       .activation(activation_name(o.activation()))
                       .bias(true)
                       .dropout(o.dropout())
                       .factory(blank(m.linear1->weight)));
  made->options.factory(factory_of(m.linear1->weight));
  return made;
}

// The options of a block like torch's layer.
template <typename Options, typename Layer>
Options block_like(const Layer& m) {
  return Options(attention_like(*m.self_attn), feed_forward_like(m))
      .norm("layer")
      .pre_norm(false)
      .eps(m.norm1->options.eps())
      .dropout(m.options.dropout());
}

template <typename Layer>
StateDict block_state(const Layer& m, const torch::nn::LayerNorm& last) {
  StateDict state{{"mlp.up_proj.weight", m.linear1->weight},         {"mlp.up_proj.bias", m.linear1->bias},
                  {"mlp.down_proj.weight", m.linear2->weight},       {"mlp.down_proj.bias", m.linear2->bias},
                  {"input_layernorm.weight", m.norm1->weight},       {"input_layernorm.bias", m.norm1->bias},
                  {"post_attention_layernorm.weight", last->weight}, {"post_attention_layernorm.bias", last->bias}};
  put_attention(state, "self_attn.", *m.self_attn);
  return state;
}

template <typename Holder>
Holder filled(Holder made, const StateDict& state, bool training) {
  fill(*made, state);
  made->train(training);
  return made;
}

template <typename Impl>
void check_given(const torch::nn::ModuleHolder<Impl>& module) {
  ATTNPACK_CHECK(!module.is_empty(), "module: got an empty holder, want a layer of torch::nn");
}

template <typename Holder>
Holder coder_of(const char* name, const torch::nn::AnyModule& module) {
  const auto coder = std::dynamic_pointer_cast<typename Holder::ContainedType>(module.ptr());
  ATTNPACK_CHECK(coder, name, ": got a Transformer with ", module.ptr()->name(),
                 ", want torch's own encoder and decoder");
  return Holder(coder);
}

// train() changes the parts too, which have modes of their own, so it is called only where the stack's own differs.
template <typename Holder>
Holder with_mode(Holder made, const torch::nn::Module& like) {
  if (made->is_training() != like.is_training()) made->train(like.is_training());
  return made;
}

// The stack of layers that `each` makes of torch's, and torch's last norm.
template <typename Stack, typename Layer, typename Coder, typename Each>
Stack stack_like(Coder& m, const Each& each) {
  using Block = decltype(each(std::declval<Layer>()));
  std::vector<Block> layers;
  for (size_t i = 0; i < m.layers->size(); ++i)
    layers.push_back(each(Layer(m.layers->template ptr<typename Layer::ContainedType>(i))));
  auto options = StackOptions<Block>(std::move(layers)).norm("none");
  if (m.norm.is_empty()) return with_mode(Stack(options), m);
  const auto norm = std::dynamic_pointer_cast<torch::nn::LayerNormImpl>(m.norm.ptr());
  ATTNPACK_CHECK(norm && norm->weight.defined(), "norm: got ", m.norm.ptr()->name(),
                 ", want a torch::nn::LayerNorm with a weight, or none");
  Stack made(options.norm("layer").eps(norm->options.eps()));
  fill(*made->norm.module(), {{"weight", norm->weight}, {"bias", norm->bias}});
  return with_mode(made, m);
}

}  // namespace

MultiHeadAttention from_torch(const torch::nn::ModuleHolder<torch::nn::MultiheadAttentionImpl>& module) {
  check_given(module);
  StateDict state;
  put_attention(state, "", *module);
  return filled(attention_like(*module), state, module->is_training());
}

EncoderBlock from_torch(const torch::nn::ModuleHolder<torch::nn::TransformerEncoderLayerImpl>& module) {
  check_given(module);
  return filled(EncoderBlock(block_like<EncoderBlockOptions>(*module)), block_state(*module, module->norm2),
                module->is_training());
}

DecoderBlock from_torch(const torch::nn::ModuleHolder<torch::nn::TransformerDecoderLayerImpl>& module) {
  check_given(module);
  auto options = block_like<DecoderBlockOptions>(*module);
  options.cross_attention(attention_like(*module->multihead_attn));
  auto state = block_state(*module, module->norm3);
  put_attention(state, "cross_attn.", *module->multihead_attn);
  state["cross_attention_layernorm.weight"] = module->norm2->weight;
  state["cross_attention_layernorm.bias"] = module->norm2->bias;
  return filled(DecoderBlock(options), state, module->is_training());
}

Encoder from_torch(const torch::nn::ModuleHolder<torch::nn::TransformerEncoderImpl>& module) {
  check_given(module);
  return stack_like<Encoder, torch::nn::TransformerEncoderLayer>(*module, [](const auto& m) { return from_torch(m); });
}

Decoder from_torch(const torch::nn::ModuleHolder<torch::nn::TransformerDecoderImpl>& module) {
  check_given(module);
  return stack_like<Decoder, torch::nn::TransformerDecoderLayer>(*module, [](const auto& m) { return from_torch(m); });
}

EncoderDecoder from_torch(const torch::nn::ModuleHolder<torch::nn::TransformerImpl>& module) {
  check_given(module);
  const EncoderDecoder made(from_torch(coder_of<torch::nn::TransformerEncoder>("custom_encoder", module->encoder)),
                            from_torch(coder_of<torch::nn::TransformerDecoder>("custom_decoder", module->decoder)));
  return with_mode(made, *module);
}

}  // namespace attnpack::convert
