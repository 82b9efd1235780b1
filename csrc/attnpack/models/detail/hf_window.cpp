#include <algorithm>

#include <attnpack/models/detail/hf_config.h>

namespace attnpack {

namespace {

// Whether some layers slide, and whether every one does.
struct SlidingLayers {
  bool some, every;
};

SlidingLayers sliding_layers(const HfSettings& config, bool has_window, int64_t first_layer) {
  const auto& kinds = config.get("layer_types");
  const auto layers = config.size("num_hidden_layers");
  if (kinds.is_null()) return {has_window && first_layer < layers, has_window && first_layer <= 0};
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
  const bool some = std::any_of(list->begin(), list->end(), slides);
  config.check(!some || has_window,
               "layer_types in config.json has 'sliding_attention', but no sliding_window is in use; get the "
               "checkpoint again");
  return {some, std::all_of(list->begin(), list->end(), slides)};
}

}  // namespace

std::optional<Window> hf_window(const HfSettings& config, bool used, int64_t first_layer, int64_t max_positions) {
  static const Json kUsual{int64_t(4096)};
  const auto& said = config.get("sliding_window");
  const auto& value = used && said.is_null() && !config.has("sliding_window") ? kUsual : said;
  const auto [some, every] = sliding_layers(config, used && !value.is_null(), first_layer);
  if (!some) return std::nullopt;
  const auto* width = value.as<int64_t>();
  config.check(width && *width >= 1, "sliding_window in config.json is ", brief(shown(value)),
               ", wants an int of at least 1, or null");
  if (every) return Window{*width - 1, 0};
  config.check(*width >= max_positions, "sliding_window is ", *width,
               " in some layers only, which is not supported yet, and shorter than the context of ", max_positions,
               "; pass max_positions=", *width, " or less");
  return std::nullopt;
}

}  // namespace attnpack
