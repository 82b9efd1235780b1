#pragma once

#include <attnpack/modules/norm.h>
#include <attnpack/modules/rotary_embedding.h>

#include <algorithm>
#include <array>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace attnpack {

using OptionTexts = std::vector<std::pair<std::string, std::string>>;

template <typename Options>
OptionTexts option_texts(const Options& options);
std::string join_options(const OptionTexts& options);

// An option as pretty_print shows it; none for a switch that is off, a factor of 0, and a part that is a child module.
inline std::optional<std::string> option_text(bool on) { return on ? std::make_optional("true") : std::nullopt; }
inline std::optional<std::string> option_text(int64_t size) { return std::to_string(size); }
inline std::optional<std::string> option_text(const std::string& word) { return word; }
inline std::optional<std::string> option_text(double number) {
  return number == 0 ? std::nullopt : std::make_optional((std::ostringstream() << number).str());
}
inline std::optional<std::string> option_text(const std::array<int64_t, 2>& window) {
  return c10::str("(", window[0], ", ", window[1], ")");
}
template <typename T>
std::optional<std::string> option_text(const std::vector<T>& list) {
  std::string text;
  if constexpr (std::is_arithmetic_v<T>) {
    for (const auto& value : list) text += (text.empty() ? "[" : ", ") + (std::ostringstream() << value).str();
  }
  return text.empty() ? std::nullopt : std::make_optional(text + "]");
}
template <typename T>
std::optional<std::string> option_text(const std::optional<T>& value) {
  return value ? option_text(*value) : std::nullopt;
}
// A struct of options, such as RopeScaling, shows what differs from its default.
template <typename T>
std::optional<std::string> option_text(const T& value) {
  if constexpr (requires { T::for_each_option(value, [](const char*, const auto&) {}); }) {
    auto texts = option_texts(value);
    OptionTexts usual;
    if constexpr (std::is_default_constructible_v<T>) usual = option_texts(T());
    std::erase_if(texts, [&](const auto& text) { return std::find(usual.begin(), usual.end(), text) != usual.end(); });
    return c10::str("{", join_options(texts), "}");
  }
  return std::nullopt;
}

inline std::optional<std::string> option_text(const QkNorm& norm) {
  if (!norm) return std::nullopt;
  auto texts = option_texts(norm);
  const auto usual = option_texts(QkNorm(true));
  std::erase_if(texts, [&](const auto& text) { return std::find(usual.begin(), usual.end(), text) != usual.end(); });
  return texts.empty() ? option_text(true) : std::make_optional(c10::str("{", join_options(texts), "}"));
}

template <typename Options>
OptionTexts option_texts(const Options& options) {
  OptionTexts texts;
  Options::for_each_option(options, [&](const char* name, const auto& value) {
    if constexpr (requires { options.gate(); }) {
      if (!options.gate() && std::string(name) == "gate_activation") return;
    }
    if constexpr (requires { options.own_keys(); }) {  // on by default
      if (std::string(name) == "own_keys") {
        if (!options.own_keys()) texts.emplace_back(name, "false");
        return;
      }
    }
    if (auto text = option_text(value)) texts.emplace_back(name, std::move(*text));
  });
  return texts;
}

// embed_dim=8, num_heads=2, causal=true
inline std::string join_options(const OptionTexts& options) {
  std::string joined;
  for (const auto& [name, text] : options) joined += (joined.empty() ? "" : ", ") + name + "=" + text;
  return joined;
}

// For pretty_print: the name of the module and its options, then `remark`.
template <typename Options>
void print_options(std::ostream& stream, const char* name, const Options& options, const char* remark = "") {
  stream << name << "(" << join_options(option_texts(options)) << remark << ")";
}

}  // namespace attnpack
