#include <attnpack/convert/models.h>

#include <ATen/ATen.h>

#include <algorithm>

#include <attnpack/convert/detail/whole_model.h>
#include <attnpack/core/check.h>
#include <attnpack/modules/state_dict.h>

namespace attnpack::convert {

namespace {

ToGqaOptions for_layer(ToGqaOptions options, uint64_t number) {
  if (options.seed()) options.seed(*options.seed() + 4 * number);  // a layer draws up to four tensors
  return options;
}

template <typename Holder>
std::shared_ptr<torch::nn::Module> try_convert(const std::shared_ptr<torch::nn::Module>& module, int64_t num_kv_heads,
                                               const ToGqaOptions& options) {
  const auto impl = std::dynamic_pointer_cast<typename Holder::ContainedType>(module);
  return impl ? to_gqa(Holder(impl), num_kv_heads, options).ptr() : nullptr;
}

// Replaces the attention layers that a stack's blocks hold, and counts them.
class BlockConverter {
 public:
  BlockConverter(int64_t num_kv_heads, const ToGqaOptions& options) : num_kv_heads_(num_kv_heads), options_(options) {}

  uint64_t count() const { return count_; }

  template <typename Block, typename Stack>
  void convert(Stack& stack) {
    for (const auto& layer : *stack.layers.operator->()) {
      auto* block = dynamic_cast<Block*>(layer.get());
      if (!block) continue;
      block->for_each_part([&](const std::string& name, auto& part) {
        if constexpr (std::is_same_v<std::decay_t<decltype(part)>, Part<AttentionModule>>) replace(*block, name, part);
      });
    }
  }

 private:
  void replace(torch::nn::Module& block, const std::string& name, Part<AttentionModule>& part) {
    const auto options = for_layer(options_, count_);
    auto made = try_convert<MultiHeadAttention>(part.module(), num_kv_heads_, options);
    if (!made) made = try_convert<GroupedQueryAttention>(part.module(), num_kv_heads_, options);
    if (!made) made = try_convert<MultiQueryAttention>(part.module(), num_kv_heads_, options);
    if (!made) return;
    part = Part<AttentionModule>(made);
    block.replace_module(name, made);
    ++count_;
  }

  int64_t num_kv_heads_;
  ToGqaOptions options_;
  uint64_t count_ = 0;
};

}  // namespace

CausalLM to_gqa(const CausalLM& model, int64_t num_kv_heads, const ToGqaOptions& options) {
  refuse_calibration(options.calibration().x.defined());
  const auto& source = model->options;
  ATTNPACK_CHECK(!source.latent(), "model: got one of latent attention, which has no kv heads to merge");
  refuse_shared_norm(source.qk_norm().all_heads());
  const auto scores = source.scores().value_or(ScoreSettings());
  ATTNPACK_CHECK(!scores.alibi(),
                 "model: got one with ALiBi, whose slopes belong to the places of its heads; merged "
                 "heads are put in another order");
  ATTNPACK_CHECK(!scores.gate(),
                 "model: got one with gates, whose rows belong to the places of its heads; merged heads ",
                 "are put in another order");
  const auto layers = model->resolved_layers();
  ATTNPACK_CHECK(!std::all_of(layers.begin(), layers.end(), [](const auto& layer) { return layer.recurrent(); }),
                 "model: got one whose layers are all recurrent, which have no kv heads to merge");
  for (const auto& layer : layers)
    ATTNPACK_CHECK(layer.head_dim() == source.head_dim() && layer.num_kv_heads() == source.num_kv_heads() &&
                       !layer.keys_as_values() && !layer.kv_from(),
                   "model: got one whose layers have heads of several sizes, or share keys, want layers alike");
  auto state = state_dict(*model);
  for (auto& [name, tensor] : state) tensor = tensor.detach().clone();
  for (int64_t layer = 0; layer < source.num_layers(); ++layer) {
    if (layers[layer].recurrent()) continue;
    const auto name = [&](const char* rest) { return c10::str("model.layers.", layer, ".self_attn.", rest); };
    const auto find = [&](const char* rest) {
      const auto found = state.find(name(rest));
      return found == state.end() ? at::Tensor() : found->second;
    };
    const auto layer_options = for_layer(options, layer);
    const auto merged =
        merge_kv_heads({find("q_proj.weight"), find("k_proj.weight"), find("v_proj.weight"), find("o_proj.weight"),
                        find("q_proj.bias"), find("k_proj.bias"), find("v_proj.bias")},
                       MergeOptions(source.num_heads(), *source.num_kv_heads(), num_kv_heads)
                           .method(layer_options.method())
                           .window(layer_options.window())
                           .groups(layer_options.groups())
                           .seed(layer_options.seed())
                           .rope_dim(layers[layer].rope() ? scores.rope_dim().value_or(*source.head_dim()) : 0)
                           .interleaved(source.rope_interleaved())
                           .key_norm(bool(source.qk_norm()))
                           .reorder(true));
    const auto& w = merged.weights;
    state[name("q_proj.weight")] = w.q, state[name("k_proj.weight")] = w.k;
    state[name("v_proj.weight")] = w.v, state[name("o_proj.weight")] = w.o;
    if (w.q_bias.defined()) state[name("q_proj.bias")] = w.q_bias;
    if (w.k_bias.defined()) state[name("k_proj.bias")] = w.k_bias;
    if (w.v_bias.defined()) state[name("v_proj.bias")] = w.v_bias;
    if (scores.sinks()) {
      const auto order = at::tensor(merged.head_order, at::kLong).to(find("sinks").device());
      state[name("sinks")] = find("sinks").index_select(0, order);
    }
  }
  auto target = source;
  target.num_kv_heads(num_kv_heads).factory().device = at::kMeta;  // replaced below
  CausalLM made(target);
  made->options.factory(source.factory());
  assign_state_dict(*made, state);
  copy_requires_grad(*model, *made);
  made->train(model->is_training());
  return made;
}

EncoderDecoder to_gqa(const EncoderDecoder& model, int64_t num_kv_heads, const ToGqaOptions& options, bool encoder) {
  refuse_calibration(options.calibration().x.defined());
  EncoderDecoder made(std::dynamic_pointer_cast<EncoderDecoderImpl>(model->clone()));
  BlockConverter converter(num_kv_heads, options);
  if (encoder) converter.convert<EncoderBlockImpl>(*made->encoder.operator->());
  converter.convert<DecoderBlockImpl>(*made->decoder.operator->());
  check_layers_found("model", "EncoderDecoder", converter.count());
  copy_requires_grad(*model, *made);
  return made;
}

}  // namespace attnpack::convert
