#include <attnpack/modules/detail/print_options.h>

#include <algorithm>
#include <string_view>

namespace attnpack {

std::optional<std::string> option_text(bool on) { return on ? std::make_optional("true") : std::nullopt; }
std::optional<std::string> option_text(int64_t size) { return std::to_string(size); }
std::optional<std::string> option_text(const std::string& word) { return word; }
std::optional<std::string> option_text(double number) {
  return number == 0 ? std::nullopt : std::make_optional(text_of({number}));
}
std::optional<std::string> option_text(const std::array<int64_t, 2>& window) {
  return text_of({"(", window[0], ", ", window[1], ")"});
}

std::optional<std::string> option_text(const QkNorm& norm) {
  if (!norm) return std::nullopt;
  const auto changed = changed_options(option_texts(norm), option_texts(QkNorm(true)));
  return changed.empty() ? option_text(true) : std::make_optional("{" + join_options(changed) + "}");
}

void add_option_text(OptionTexts& texts, const char* name, std::optional<std::string> text) {
  if (text) texts.emplace_back(name, std::move(*text));
}

void add_switch_text(OptionTexts& texts, const char* name, bool on) {
  if (std::string_view(name) != "own_keys")
    add_option_text(texts, name, option_text(on));
  else if (!on)
    texts.emplace_back(name, "false");
}

void remove_option_text(OptionTexts& texts, const char* name) {
  std::erase_if(texts, [&](const auto& text) { return text.first == name; });
}

OptionTexts changed_options(OptionTexts options, const OptionTexts& usual) {
  std::erase_if(options, [&](const auto& text) { return std::find(usual.begin(), usual.end(), text) != usual.end(); });
  return options;
}

// embed_dim=8, num_heads=2, causal=true
std::string join_options(const OptionTexts& options) {
  std::string joined;
  for (const auto& [name, text] : options) joined += (joined.empty() ? "" : ", ") + name + "=" + text;
  return joined;
}

}  // namespace attnpack
