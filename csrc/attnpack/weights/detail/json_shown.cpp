#include <attnpack/weights/detail/json.h>

#include <cmath>

#include <nlohmann/json.hpp>

#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

namespace {

// Longer texts are cut by excerpt(): no more of them is worth building.
constexpr size_t kEnough = 1000;

void append(std::string& text, const Json& value);

template <typename Items, typename Append>
void append_items(std::string& text, const Items& items, const char* brackets, const Append& append_item) {
  text += brackets[0];
  for (const auto& item : items) {
    if (&item != &items.front()) text += ", ";
    append_item(item);
    if (text.size() > kEnough) return;
  }
  text += brackets[1];
}

struct Appender {
  std::string& text;

  void operator()(std::monostate) const { text += "None"; }
  void operator()(bool value) const { text += value ? "True" : "False"; }
  void operator()(int64_t number) const { text += std::to_string(number); }
  void operator()(uint64_t number) const { text += std::to_string(number); }
  void operator()(double number) const {
    // JSON has no such numbers, metadata of GGUF files have.
    text += std::isfinite(number) ? nlohmann::json(number).dump()
            : std::isnan(number)  ? "nan"
            : number < 0          ? "-inf"
                                  : "inf";
  }
  void operator()(const std::string& words) const { text += in_quotes(words.substr(0, kEnough)); }
  void operator()(const Json::List& list) const {
    append_items(text, list, "[]", [&](const Json& item) { append(text, item); });
  }
  void operator()(const Json::Object& object) const {
    append_items(text, object, "{}", [&](const Json::Member& member) {
      (*this)(member.name);
      text += ": ";
      append(text, member.value);
    });
  }
};

void append(std::string& text, const Json& value) { std::visit(Appender{text}, value.value); }

}  // namespace

std::string shown(const Json& value) {
  std::string text;
  append(text, value);
  return text;
}

std::ostream& operator<<(std::ostream& stream, const Quoted& quoted) {
  return stream << (quoted.value ? excerpt(shown(*quoted.value)) : "absent");
}

const char* kind_of(const Json& value) {
  static constexpr const char* kKinds[] = {"a NoneType", "a bool", "an int", "an int",
                                           "a float",    "a str",  "a list", "a dict"};
  return kKinds[value.value.index()];
}

}  // namespace attnpack
