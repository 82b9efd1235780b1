#include <attnpack/models/detail/hf_settings.h>

#include <cmath>
#include <type_traits>

namespace attnpack {

const Json& HfSettings::get(const char* name) const {
  static const Json kAbsent;
  const auto* found = config_.find(name);
  return found ? *found : kAbsent;
}

int64_t HfSettings::size(const char* name, std::optional<int64_t> usual) const {
  const auto& value = get(name);
  check(usual || !value.is_null(), "config.json lacks ", name);
  if (value.is_null()) return *usual;
  const auto* number = value.as<int64_t>();
  check(number && *number >= 1, name, " in config.json is ", brief(shown(value)), ", wants an int of at least 1");
  return *number;
}

double HfSettings::as_number(const std::string& name, const Json& value) const {
  const double number = value.as<bool>() ? 0 : number_in(value).value_or(0);
  check(number > 0 && std::isfinite(number), name, " in config.json is ", brief(shown(value)),
        ", wants a number above 0");
  return number;
}

double HfSettings::number(const char* name, double usual) const {
  const auto& value = get(name);
  return value.is_null() ? usual : as_number(name, value);
}

bool HfSettings::is_set(const char* name) const { return attnpack::is_set(get(name)); }

std::string HfSettings::model_type() const {
  const auto* word = get("model_type").as<std::string>();
  return word ? *word : "";
}

bool is_set(const Json& value) {
  return std::visit(
      [](const auto& held) {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return false;
        } else if constexpr (std::is_arithmetic_v<T>) {
          return held != 0;
        } else {
          return !held.empty();
        }
      },
      value.value);
}

std::optional<double> number_in(const Json& value) {
  return std::visit(
      [](const auto& held) {
        std::optional<double> number;
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(held)>>) number = held;
        return number;
      },
      value.value);
}

}  // namespace attnpack
