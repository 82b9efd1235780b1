#include <attnpack/convert/models.h>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>

#include <attnpack/convert/detail/model_checks.h>
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

// The inputs of the layers' attention for a text, [rows * L, E] each. The modules' modes stay as they are.
std::vector<at::Tensor> attention_inputs(CausalLM model, const at::Tensor& ids) {
  std::vector<at::Tensor> inputs;
  const auto modules = model->modules();
  std::vector<bool> training;
  for (const auto& module : modules) training.push_back(module->is_training());
  const auto restore = c10::make_scope_exit([&] {
    for (size_t i = 0; i < modules.size(); ++i) modules[i]->train(training[i]);  // parents first
  });
  model->eval();
  auto states = model->model->embed_tokens->forward(ids) * model->options.embed_scale();
  for (int64_t i = 0; i < model->options.num_layers(); ++i) {
    auto block = model->layer(i);
    inputs.push_back(block->input_layernorm->forward(states).flatten(0, 1));
    if (i + 1 < model->options.num_layers()) states = block->forward(states);
  }
  return inputs;
}

// The tensors of a state dict whose names begin with `prefix`, without it.
StateDict layer_of(const StateDict& state, const std::string& prefix) {
  StateDict part;
  for (const auto& [name, tensor] : state)
    if (name.starts_with(prefix)) part[name.substr(prefix.size())] = tensor;
  return part;
}

// The model that the options describe, with these tensors, and as `like` otherwise.
CausalLM with_state(CausalLMOptions options, const StateDict& state, const CausalLM& like) {
  options.factory().device = at::kMeta;  // replaced below
  CausalLM made(options);
  made->options.factory(like->options.factory());
  assign_state_dict(*made, state);
  copy_requires_grad(*like, *made);
  made->train(like->is_training());
  return made;
}

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
    const auto name = [&](const char* rest) { return text_of({"model.layers.", layer, ".self_attn.", rest}); };
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
  return with_state(target.num_kv_heads(num_kv_heads), state, model);
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

CausalLM to_mla(const CausalLM& model, int64_t kv_lora_rank, const ToMlaOptions& options) {
  const at::NoGradGuard no_grad;
  refuse_calibration(options.calibration().x.defined());
  const auto& ids = options.ids();
  ATTNPACK_CHECK(!ids.defined() || (ids.dim() == 2 && ids.scalar_type() == at::kLong && ids.numel() > 0),
                 "ids: got shape ", ids.sizes(), ", want int64 token ids [rows, length] of a text");
  LatentConversion conversion(model->options, kv_lora_rank, options.rope_dim(),
                              ids.defined() ? ids.size(1) : options.length());
  const auto seen = ids.defined() ? attention_inputs(model, ids) : std::vector<at::Tensor>(model->options.num_layers());
  auto state = state_dict(*model);
  const auto prefix = [](int64_t layer) { return text_of({"model.layers.", layer, "."}); };
  for (int64_t i = 0; conversion.learns() && i < model->options.num_layers(); ++i)
    conversion.learn(layer_of(state, prefix(i)), seen[i]);
  for (int64_t i = 0; i < model->options.num_layers(); ++i) {
    const auto layer = layer_of(state, prefix(i));
    for (const auto& [name, tensor] : layer) state.erase(prefix(i) + name);
    for (const auto& [name, tensor] : conversion.convert(layer, seen[i])) state[prefix(i) + name] = tensor;
  }
  for (auto& [name, tensor] : state) tensor = tensor.detach().clone();
  return with_state(conversion.options(), state, model);
}

CausalLM fold_multipliers(const CausalLM& model) {
  const at::NoGradGuard no_grad;
  const auto& source = model->options;
  ATTNPACK_CHECK(source.norm() == "rms" && !source.layout() && !source.head_bias() && source.final_softcap() == 0,
                 "model: got one with another norm or layout, a bias or a soft cap on its logits, want one of Llama's "
                 "form");
  auto state = state_dict(*model);
  for (auto& [name, tensor] : state) tensor = with_multipliers(source, name, tensor).detach().clone();
  auto target = source;
  return with_state(target.embed_scale(1).residual_scale(1).logit_scale(1), state, model);
}

}  // namespace attnpack::convert
