#include <algorithm>
#include <map>

#include <attnpack/models/detail/hf_families.h>

namespace attnpack {

namespace {

constexpr int64_t kMostExperts = 4096;  // so that a lie costs little; DeepSeek-V3 has 256

// Whether each layer slides by layer_types; none where it is absent.
std::optional<std::vector<bool>> sliding_layers(const HfSettings& config, int64_t layers) {
  const auto& kinds = config.get("layer_types");
  if (kinds.is_null()) return std::nullopt;
  const auto is_kind = [](const Json& kind, std::string_view wanted) {
    const auto* word = kind.as<std::string>();
    return word && *word == wanted;
  };
  const auto slides = [&](const Json& kind) { return is_kind(kind, "sliding_attention"); };
  const auto is_known = [&](const Json& kind) { return slides(kind) || is_kind(kind, "full_attention"); };
  const auto* list = kinds.as<Json::List>();
  config.check(
      list && static_cast<int64_t>(list->size()) == layers && std::all_of(list->begin(), list->end(), is_known),
      "layer_types in config.json is ", brief(shown(kinds)),
      ", wants 'full_attention' or 'sliding_attention' for each of ", layers, " layers");
  std::vector<bool> found(list->size());
  std::transform(list->begin(), list->end(), found.begin(), slides);
  return found;
}

std::vector<LayerSettings>& layers_of(CausalLMOptions& options) {
  if (options.layer_settings().empty()) options.layer_settings().resize(options.num_layers());
  return options.layer_settings();
}

std::string activation(const HfSettings& config, const char* usual, const std::map<std::string, const char*>& known) {
  const auto& value = config.get("hidden_act");
  const auto* word = value.as<std::string>();
  const auto found = known.find(value.is_null() ? usual : word ? *word : "");
  std::string names;
  for (const auto& [name, ours] : known) names += (names.empty() ? "" : ", ") + in_quotes(name);
  config.check(found != known.end(), config.called("hidden_act"), " ", brief(shown(value)),
               " in config.json is not supported; readable are ", names);
  return found->second;
}

}  // namespace

std::optional<int64_t> window_size(const HfSettings& config, std::optional<int64_t> usual) {
  const auto& value = config.get("sliding_window");
  if (value.is_null()) return config.has("sliding_window") ? std::nullopt : usual;
  const auto* size = value.as<int64_t>();
  config.check(size && *size >= 1, "sliding_window in config.json is ", brief(shown(value)),
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
               brief(shown(config.get("layer_types"))), ", which transformers does not honour for ",
               config.model_type(), ": there ", size ? "every layer has" : "no layer has",
               " the window; take layer_types out of config.json");
  if (size) options.window(Window{*size - 1, 0});
}

void set_dense_layers(CausalLMOptions& options, const std::function<bool(int64_t)>& is_dense) {
  auto& layers = layers_of(options);
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) layers[layer].experts(!is_dense(layer));
}

std::string gated_activation(const HfSettings& config, const char* usual) {
  return activation(config, usual, {{"silu", "swiglu"}, {"gelu", "geglu"}, {"gelu_pytorch_tanh", "geglu_tanh"}});
}

std::string plain_activation(const HfSettings& config, const char* usual) {
  return activation(
      config, usual,
      {{"gelu", "gelu"}, {"gelu_new", "gelu_tanh"}, {"gelu_pytorch_tanh", "gelu_tanh"}, {"relu", "relu"}});
}

void check_silu(const HfSettings& config) {
  const auto& value = config.get("hidden_act");
  config.check(value.is_null() || config.is_word("hidden_act", "silu"), "hidden_act ", brief(shown(value)),
               " in config.json is not supported; it must be 'silu'");
}

MixtureOfExpertsOptions experts(const HfSettings& config, int64_t width, const char* count, int64_t usual,
                                int64_t usual_k) {
  const auto number = config.size(count, usual), top_k = config.size("num_experts_per_tok", usual_k);
  config.check(number <= kMostExperts, count, " in config.json is ", number, ", wants ", kMostExperts, " at most");
  return MixtureOfExpertsOptions(1, width, number, top_k);
}

}  // namespace attnpack
