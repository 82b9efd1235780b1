#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <set>

#include <attnpack/models/detail/hf_config.h>
#include <attnpack/models/detail/hf_configure.h>
#include <attnpack/models/detail/hf_families.h>
#include <attnpack/models/detail/hf_places.h>

namespace attnpack {

namespace {
using Options = CausalLMOptions;

// Layers without a window have heads of their own. Their sizes stand in per_layer_config by the number of the layer,
// or, for all of them, in two settings.
void set_global_heads(const HfSettings& config, Options& o) {
  const bool same = config.is_on("attention_k_eq_v");
  const auto& by_layer = config.get("per_layer_config");
  const auto dim = config.size("global_head_dim", 512);
  const auto heads = same ? config.size("num_global_key_value_heads", *o.num_kv_heads()) : *o.num_kv_heads();
  const auto* given = by_layer.as<Json::Object>();
  config.check(given || by_layer.is_null(), "per_layer_config in config.json is ", quoted(by_layer),
               ", wants an object with the settings of layers by their numbers");
  if (!given) {
    for (int64_t i = 0; i < o.num_layers(); ++i)
      if (!slides(o, i)) o.layer_settings()[i].head_dim(dim).num_kv_heads(heads);
    return;
  }
  for (const auto& [number, settings] : *given) {
    const auto* members = settings.as<Json::Object>();
    const auto layer = std::strtoll(number.c_str(), nullptr, 10);
    config.check(members && std::to_string(layer) == number && layer >= 0 && layer < o.num_layers(),
                 "per_layer_config in config.json has ", excerpt(number), ", wants the numbers of layers");
    for (const auto& [name, value] : *members) {
      const auto* size = value.as<int64_t>();
      config.check((name == "head_dim" || name == "num_key_value_heads") && size && *size >= 1,
                   "per_layer_config of layer ", number, " in config.json has ", excerpt(name), " = ", quoted(value),
                   ", which is not supported; it may have head_dim and num_key_value_heads");
      if (name == "head_dim")
        o.layer_settings()[layer].head_dim(*size);
      else
        o.layer_settings()[layer].num_kv_heads(*size);
    }
  }
}

// The last layers read the keys of the last layer of their kind before them.
void set_shared_layers(const HfSettings& config, Options& o) {
  const auto shared = config.whole_number("num_kv_shared_layers", 0);
  const auto first = o.num_layers() - shared;
  config.check(first > 0, "num_kv_shared_layers in config.json is ", shared, ", wants fewer than ", o.num_layers(),
               " layers");
  const bool wide = config.is_on("use_double_wide_mlp");
  for (int64_t i = first; i < o.num_layers(); ++i) {
    int64_t source = first - 1;
    while (source >= 0 && slides(o, source) != slides(o, i)) --source;
    config.check(source >= 0, "num_kv_shared_layers = ", shared,
                 " in config.json leaves no layer of the kind of layer ", i, " with keys of its own");
    auto& layer = o.layer_settings()[i];
    layer.kv_from(source);
    if (wide) layer.hidden_dim(2 * *o.hidden_dim());
  }
}

}  // namespace

void configure_gemma4(const HfSettings& config, Options& o) {
  config.refuse_if_set("enable_moe_block");
  for (const char* name : {"num_experts", "top_k_experts", "moe_intermediate_size"}) config.get(name);
  config.check_word("use_bidirectional_attention", "vision");  // for images, which this model does not read
  o.head_dim(config.size("head_dim", 256))
      .layout("sandwich")
      .activation(gated_activation(config, "gelu_pytorch_tanh"))
      .embed_scale(std::sqrt(static_cast<double>(o.embed_dim())))
      .qk_norm(QkNorm(true).eps(o.eps()).values(true))
      .scores(ScoreSettings().scale(1))
      .final_softcap(config.softcap("final_logit_softcapping", 0));
  const auto last = o.num_layers() - 1;
  o.layer_settings().resize(o.num_layers());
  set_windows(config, o, window_size(config, 512),
              [=](int64_t layer) { return layer != last && (layer + 1) % 6 != 0; });
  config.check(!slides(o, last),
               "layer_types in config.json ends with 'sliding_attention', but the last layer has no "
               "window in transformers; write 'full_attention' there");
  const auto ropes = hf_rope_by_kind(config, 1e6, 1e4);
  const bool listed = config.is_set("rope_parameters");
  const auto full = listed
                        ? ropes.full
                        : HfRope{ropes.full.base, RopeScaling().rope_type("proportional").partial_rotary_factor(0.25)};
  set_ropes_by_kind(o, {full, ropes.sliding});
  set_global_heads(config, o);
  const bool same = config.is_on("attention_k_eq_v");
  for (int64_t i = 0; i < o.num_layers(); ++i) o.layer_settings()[i].keys_as_values(same && !slides(o, i));
  set_shared_layers(config, o);
  TailSettings tail;
  const auto input = config.whole_number("hidden_size_per_layer_input", 256);
  const auto vocab = config.size("vocab_size_per_layer_input", 262144);
  if (input > 0) tail.input_dim(input).vocab_size(vocab);
  o.tail(tail);
}

std::vector<HfPart> gemma4_parts(const std::string& name, const CausalLMOptions& o) {
  static const HfNames names{{"per_layer_input_gate", "tail.gate"},
                             {"per_layer_projection", "tail.projection"},
                             {"post_per_layer_input_norm", "tail.norm"},
                             {"model.embed_tokens_per_layer", "model.layer_inputs.embed_tokens"},
                             {"model.per_layer_model_projection", "model.layer_inputs.model_projection"},
                             {"model.per_layer_projection_norm", "model.layer_inputs.projection_norm"}};
  const auto place = place_of(name, "model.layers.");
  if (place.module.empty() && place.parameter == "layer_scalar") return whole(place.layer + "tail.scalar");
  static const std::set<std::string> keys{"self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm",
                                          "self_attn.v_norm"};
  // Older files have them for layers that read those of others; nothing reads them there.
  for (int64_t i = 0; keys.contains(place.module) && i < o.num_layers(); ++i)
    if (o.layer_settings()[i].kv_from() && place.layer == text_of({"model.layers.", i, "."})) return {};
  return renamed(name, place, names);
}

}  // namespace attnpack
