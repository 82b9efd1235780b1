#include <algorithm>
#include <map>

#include <attnpack/models/detail/hf_families.h>

namespace attnpack {

std::optional<std::vector<bool>> layers_of_kind(const HfSettings& config, int64_t layers,
                                                std::initializer_list<std::string_view> wanted_kind,
                                                std::initializer_list<std::string_view> other, const char* setting) {
  const auto& kinds = config.get(setting);
  if (kinds.is_null()) return std::nullopt;
  const auto is_kind = [](const Json& kind, std::initializer_list<std::string_view> words) {
    const auto* word = kind.as<std::string>();
    return word && std::find(words.begin(), words.end(), *word) != words.end();
  };
  const auto is_wanted = [&](const Json& kind) { return is_kind(kind, wanted_kind); };
  const auto is_known = [&](const Json& kind) { return is_wanted(kind) || is_kind(kind, other); };
  const auto* list = kinds.as<Json::List>();
  config.check(
      list && static_cast<int64_t>(list->size()) == layers && std::all_of(list->begin(), list->end(), is_known),
      setting, " in config.json is ", quoted(kinds), ", wants '", *other.begin(), "' or '", *wanted_kind.begin(),
      "' for each of ", layers, " layers");
  std::vector<bool> found(list->size());
  std::transform(list->begin(), list->end(), found.begin(), is_wanted);
  return found;
}

std::vector<LayerSettings>& layers_of(CausalLMOptions& options) {
  if (options.layer_settings().empty()) options.layer_settings().resize(options.num_layers());
  return options.layer_settings();
}

std::function<bool(int64_t layer)> dense_by_step(const HfSettings& config) {
  const auto every = config.size("decoder_sparse_step", 1);
  const auto dense = config.list_of_ints("mlp_only_layers");
  return [=](int64_t layer) {
    return (layer + 1) % every != 0 || std::find(dense.begin(), dense.end(), layer) != dense.end();
  };
}

const char* count_of_experts(const HfSettings& config) {
  return config.has("num_local_experts") ? "num_local_experts" : "num_experts";
}

namespace {

// Whether each layer slides.
std::optional<std::vector<bool>> sliding_layers(const HfSettings& config, int64_t layers) {
  return layers_of_kind(config, layers, {"sliding_attention"}, {"full_attention"});
}

std::string activation(const HfSettings& config, const char* usual, const std::map<std::string, const char*>& known) {
  const auto& value = config.get("hidden_act");
  const auto* word = value.as<std::string>();
  const auto found = known.find(value.is_null() ? usual : word ? *word : "");
  std::string names;
  for (const auto& [name, ours] : known) names += (names.empty() ? "" : ", ") + in_quotes(name);
  config.check(found != known.end(), config.called("hidden_act"), " ", quoted(value),
               " in config.json is not supported; readable are ", names);
  return found->second;
}

}  // namespace

std::optional<int64_t> window_size(const HfSettings& config, std::optional<int64_t> usual) {
  const auto& value = config.get("sliding_window");
  if (value.is_null()) return config.has("sliding_window") ? std::nullopt : usual;
  const auto* size = value.as<int64_t>();
  config.check(size && *size >= 1, "sliding_window in config.json is ", quoted(value),
               ", wants an int of at least 1, or null");
  return *size;
}

void set_windows(const HfSettings& config, CausalLMOptions& options, std::optional<int64_t> size,
                 const std::function<bool(int64_t)>& slides) {
  const auto count = options.num_layers();
  const auto given = sliding_layers(config, count);
  const auto is_sliding = [&](int64_t layer) { return given ? (*given)[layer] : size && slides(layer); };
  int64_t sliding = 0;
  for (int64_t layer = 0; layer < count; ++layer) sliding += is_sliding(layer);
  config.check(size || sliding == 0,
               "layer_types in config.json has 'sliding_attention', but no sliding_window is in use; get the "
               "checkpoint again");
  if (sliding == 0) return;
  const Window window{*size - 1, 0};
  if (sliding == count) {
    options.window(window);
    if (options.layer_settings().empty()) return;
  }
  auto& layers = layers_of(options);
  for (int64_t layer = 0; layer < count; ++layer) layers[layer].window(is_sliding(layer) ? window : Window{-1, -1});
}

void set_window(const HfSettings& config, CausalLMOptions& options, std::optional<int64_t> size) {
  const auto given = sliding_layers(config, options.num_layers());
  const auto agrees = [&](bool slides) { return slides == size.has_value(); };
  config.check(!given || std::all_of(given->begin(), given->end(), agrees), "layer_types in config.json is ",
               quoted(config.get("layer_types")), ", which transformers does not honour for ", config.model_type(),
               ": there ", size ? "every layer has" : "no layer has",
               " the window; take layer_types out of config.json");
  if (size) options.window(Window{*size - 1, 0});
}

void set_ropes_by_kind(CausalLMOptions& options, const HfRopeByKind& ropes) {
  const auto& [all, sliding] = ropes;
  const bool all_slide = options.layer_settings().empty() && options.window().has_value();
  const auto& usual = all_slide ? sliding : all;
  options.rope_base(usual.base).rope_scaling(usual.scaling);
  auto& layers = options.layer_settings();
  for (size_t i = 0; i < layers.size(); ++i)
    if (slides(options, static_cast<int64_t>(i)))
      layers[i].rope_base(sliding.base).rope_scaling(sliding.scaling.value_or(RopeScaling()));
}

bool slides(const CausalLMOptions& options, int64_t layer) {
  constexpr Window kNone{-1, -1};
  const auto& layers = options.layer_settings();
  const auto layer_window = layers.empty() ? std::nullopt : layers[layer].window();
  return layer_window.value_or(options.window().value_or(kNone)) != kNone;
}

void set_rotated_layers(CausalLMOptions& options, const std::function<bool(int64_t)>& rotates) {
  int64_t rotated = 0;
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) rotated += rotates(layer);
  if (rotated == 0) options.position_embedding("none");
  if (rotated == 0 || rotated == options.num_layers()) return;
  auto& layers = layers_of(options);
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) layers[layer].rope(rotates(layer));
}

std::vector<bool> rotated_layers(const HfSettings& config, int64_t layers) {
  const auto given = config.list_of_ints("no_rope_layers");
  const auto every = config.size("no_rope_layer_interval", 4);
  config.check(given.empty() || static_cast<int64_t>(given.size()) >= layers, "no_rope_layers in config.json has ",
               given.size(), " numbers, wants one for each of ", layers, " layers");
  std::vector<bool> rotates(layers);
  for (int64_t layer = 0; layer < layers; ++layer)
    rotates[layer] = given.empty() ? (layer + 1) % every != 0 : given[layer] != 0;
  return rotates;
}

void set_rotated_part(const HfSettings& config, CausalLMOptions& options, double usual) {
  const auto part = hf_rotated_part(config, usual);
  if (part == 1) return;
  auto scores = options.scores().value_or(ScoreSettings());
  options.scores(scores.rope_dim(static_cast<int64_t>(part * static_cast<double>(*options.head_dim()))));
}

void set_multipliers(const HfSettings& config, CausalLMOptions& options) {
  options.embed_scale(config.number("embedding_multiplier", 1))
      .residual_scale(config.number("residual_multiplier", 1))
      .logit_scale(1 / config.number("logits_scaling", 1))
      .scores(ScoreSettings().scale(config.number("attention_multiplier", 1)));
}

std::optional<QueryScale> log_query_scale(const HfSettings& config) {
  const auto &beta = hf_rope_member(config, "llama_4_scaling_beta"),
             &length = hf_rope_member(config, "original_max_position_embeddings");
  if (beta.is_null() || number_in(beta) == 0.0) return std::nullopt;
  return QueryScale()
      .type("log")
      .llama_4_scaling_beta(config.as_number("llama_4_scaling_beta", beta))
      .original_max_position_embeddings(config.as_number("original_max_position_embeddings", length));
}

void set_latent(const HfSettings& config, CausalLMOptions& options, MultiHeadLatentAttentionOptions latent) {
  config.check(*options.num_kv_heads() == options.num_heads(), "num_key_value_heads in config.json is ",
               *options.num_kv_heads(), ", but latent attention has as many as num_attention_heads");
  for (const char* name : {"head_dim", "qk_head_dim"}) config.get(name);  // they follow from the others
  latent.kv_lora_rank(config.size("kv_lora_rank", latent.kv_lora_rank()))
      .qk_nope_head_dim(config.size("qk_nope_head_dim", latent.qk_nope_head_dim()))
      .qk_rope_head_dim(config.size("qk_rope_head_dim", latent.qk_rope_head_dim()))
      .v_head_dim(config.size("v_head_dim", latent.v_head_dim()));
  if (config.has("q_lora_rank")) {
    const bool none = config.get("q_lora_rank").is_null();
    latent.q_lora_rank(none ? std::nullopt : std::make_optional(config.size("q_lora_rank")));
  }
  options.latent(latent).num_kv_heads(std::nullopt).head_dim(std::nullopt).out_bias(std::nullopt);
}

void set_dense_layers(CausalLMOptions& options, const std::function<bool(int64_t)>& is_dense) {
  auto& layers = layers_of(options);
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) layers[layer].experts(!is_dense(layer));
}

void set_first_dense(const HfSettings& config, CausalLMOptions& options, const char* setting, int64_t usual) {
  const auto dense = config.whole_number(setting, usual);
  set_dense_layers(options, [=](int64_t layer) { return layer < dense; });
}

std::string gated_activation(const HfSettings& config, const char* usual) {
  return activation(
      config, usual,
      {{"silu", "swiglu"}, {"gelu", "geglu"}, {"gelu_new", "geglu_tanh"}, {"gelu_pytorch_tanh", "geglu_tanh"}});
}

std::string plain_activation(const HfSettings& config, const char* usual) {
  return activation(config, usual,
                    {{"gelu", "gelu"},
                     {"gelu_new", "gelu_tanh"},
                     {"gelu_pytorch_tanh", "gelu_tanh"},
                     {"relu", "relu"},
                     {"relu2", "relu2"}});
}

void check_silu(const HfSettings& config) {
  const auto& value = config.get("hidden_act");
  config.check(value.is_null() || config.is_word("hidden_act", "silu"), "hidden_act ", quoted(value),
               " in config.json is not supported; it must be 'silu'");
}

MixtureOfExpertsOptions experts(const HfSettings& config, int64_t width, const char* count, int64_t usual,
                                int64_t usual_k) {
  const auto number = config.size(count, usual), top_k = config.size("num_experts_per_tok", usual_k);
  config.check(number <= kMostExperts, count, " in config.json is ", number, ", wants ", kMostExperts, " at most");
  return MixtureOfExpertsOptions(1, width, number, top_k);
}

}  // namespace attnpack
