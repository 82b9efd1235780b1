#include <attnpack/weights/detail/json_number.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

namespace {

// The power of ten of a number's first digit that is not 0; far below 0 if there is none.
int64_t magnitude(std::string_view text) {
  constexpr int64_t kNone = -1'000'000'000'000;
  const auto mantissa = text.substr(0, text.find_first_of("eE"));
  const auto first = mantissa.find_first_of("123456789"), point = std::min(mantissa.find('.'), mantissa.size());
  if (first == std::string_view::npos) return kNone;
  const int64_t own = first < point ? point - first - 1 : -static_cast<int64_t>(first - point);
  if (mantissa.size() == text.size()) return own;
  auto exponent = text.substr(mantissa.size() + 1);
  if (exponent[0] == '+') exponent.remove_prefix(1);
  int64_t given = 0;
  const auto ended = std::from_chars(exponent.data(), exponent.data() + exponent.size(), given);
  if (ended.ec != std::errc()) given = exponent[0] == '-' ? kNone : -kNone;
  return own + std::clamp(given, kNone, -kNone);
}

}  // namespace

double read_json_double(std::string_view text) {
  double number = 0;
  const auto ended = std::from_chars(text.data(), text.data() + text.size(), number);
  if (ended.ec == std::errc() && std::isfinite(number)) return number;
  refuse_unless(magnitude(text) < 0, "the number ", brief(text), " is too large");
  return text[0] == '-' ? -0.0 : 0.0;
}

Json read_json_integer(std::string_view text) {
  const auto try_read = [&](auto number, Json& result) {
    const auto ended = std::from_chars(text.data(), text.data() + text.size(), number);
    if (ended.ec == std::errc()) result.value = number;
    return ended.ec == std::errc();
  };
  Json result;
  if (text != "-0" && (try_read(int64_t(), result) || (text[0] != '-' && try_read(uint64_t(), result)))) return result;
  result.value = read_json_double(text);
  return result;
}

}  // namespace attnpack
