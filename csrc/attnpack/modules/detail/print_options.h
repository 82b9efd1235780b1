#pragma once

#include <attnpack/core/text.h>
#include <attnpack/modules/norm.h>
#include <attnpack/modules/rotary_embedding.h>

#include <array>
#include <optional>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace attnpack {

using OptionTexts = std::vector<std::pair<std::string, std::string>>;

template <typename Options>
OptionTexts option_texts(const Options& options);
std::string join_options(const OptionTexts& options);
OptionTexts changed_options(OptionTexts options, const OptionTexts& usual);

// An option as pretty_print shows it; none for a switch that is off, a factor of 0, and a part that is a child module.
std::optional<std::string> option_text(bool on);
std::optional<std::string> option_text(int64_t size);
std::optional<std::string> option_text(const std::string& word);
std::optional<std::string> option_text(double number);
std::optional<std::string> option_text(const std::array<int64_t, 2>& window);
std::optional<std::string> option_text(const QkNorm& norm);
template <typename T>
std::optional<std::string> option_text(const std::vector<T>& list) {
  std::string text;
  if constexpr (std::is_arithmetic_v<T>) {
    for (const auto& value : list) text += text_of({text.empty() ? "[" : ", ", value});
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
    OptionTexts usual;
    if constexpr (std::is_default_constructible_v<T>) usual = option_texts(T());
    return "{" + join_options(changed_options(option_texts(value), usual)) + "}";
  }
  return std::nullopt;
}

// Adds what is shown of an option: nothing for none.
void add_option_text(OptionTexts& texts, const char* name, std::optional<std::string> text);
// own_keys is on by default, so it is shown where it is off.
void add_switch_text(OptionTexts& texts, const char* name, bool on);
void remove_option_text(OptionTexts& texts, const char* name);

template <typename Options>
OptionTexts option_texts(const Options& options) {
  OptionTexts texts;
  Options::for_each_option(options, [&](const char* name, const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, bool>)
      add_switch_text(texts, name, value);
    else
      add_option_text(texts, name, option_text(value));
  });
  if constexpr (requires { options.gate(); }) {
    if (!options.gate()) remove_option_text(texts, "gate_activation");
  }
  return texts;
}

// For pretty_print: the name of the module and its options, then `remark`.
template <typename Options>
void print_options(std::ostream& stream, const char* name, const Options& options, const char* remark = "") {
  stream << name << "(" << join_options(option_texts(options)) << remark << ")";
}

}  // namespace attnpack
