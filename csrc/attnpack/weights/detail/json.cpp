#include <attnpack/weights/detail/json.h>

#include <algorithm>
#include <charconv>

#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/json_number.h>
#include <attnpack/weights/detail/utf8.h>

namespace attnpack {

namespace {

constexpr int kDeepest = 127;  // objects and lists in each other, as in serde_json

bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Parser {
 public:
  explicit Parser(std::string_view text) : begin_(text.data()), at_(begin_), end_(begin_ + text.size()) {}

  Json parse() {
    auto result = read_value(0);
    skip_spaces();
    want(at_ == end_, "Extra data");
    return result;
  }

 private:
  void want(bool condition, const char* words) const { refuse_unless(condition, words, " at byte ", at_ - begin_); }
  void skip_spaces() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }
  bool take(char c) {
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }
  bool take(std::string_view word) {
    if (std::string_view(at_, end_ - at_).substr(0, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json read_value(int depth) {
    skip_spaces();
    if (take('{')) return {read_object(depth + 1)};
    if (take('[')) return {read_list(depth + 1)};
    if (take('"')) return {read_text()};
    if (take("true")) return {true};
    if (take("false")) return {false};
    if (take("null")) return {};
    for (const auto* word : {"NaN", "Infinity", "-Infinity"}) refuse_unless(!take(word), word, " is no JSON number");
    return read_number();
  }

  Json::Object read_object(int depth) {
    refuse_unless(depth <= kDeepest, "values more than ", kDeepest, " deep in each other");
    Json::Object object;
    skip_spaces();
    if (take('}')) return object;
    do {
      skip_spaces();
      want(take('"'), "Expecting a name in double quotes");
      auto name = read_text();
      skip_spaces();
      want(take(':'), "Expecting ':'");
      object.push_back({std::move(name), read_value(depth)});
      skip_spaces();
    } while (take(','));
    want(take('}'), "Expecting ',' or '}'");
    check_names(object);
    return object;
  }

  static void check_names(const Json::Object& object) {
    std::vector<std::string_view> names;
    for (const auto& member : object) names.emplace_back(member.name);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    refuse_unless(twice == names.end(), brief(twice == names.end() ? "" : *twice), " is in an object twice");
  }

  Json::List read_list(int depth) {
    refuse_unless(depth <= kDeepest, "values more than ", kDeepest, " deep in each other");
    Json::List list;
    skip_spaces();
    if (take(']')) return list;
    do {
      list.push_back(read_value(depth));
      skip_spaces();
    } while (take(','));
    want(take(']'), "Expecting ',' or ']'");
    return list;
  }

  std::string read_text() {
    std::string text;
    for (;;) {
      const auto* from = at_;
      while (at_ < end_ && *at_ != '"' && *at_ != '\\' && static_cast<unsigned char>(*at_) >= 0x20) ++at_;
      text.append(from, at_);
      if (take('"')) return text;
      want(take('\\'), at_ == end_ ? "Expecting the end of a text" : "a control character in a text");
      append_escaped(text);
    }
  }

  void append_escaped(std::string& text) {
    static constexpr char kMarks[] = "\"\\/bfnrt", kMeant[] = "\"\\/\b\f\n\r\t";
    want(at_ < end_, "Expecting the end of a text");
    if (take('u')) return append_utf8(text, read_code_point());
    const auto* found = std::find(kMarks, kMarks + 8, *at_);
    want(found != kMarks + 8, "an unknown escape");
    text += kMeant[found - kMarks];
    ++at_;
  }

  uint32_t read_code_point() {
    const auto high = read_hex();
    if (high < 0xd800 || high > 0xdfff) return high;
    const auto low = high < 0xdc00 && take("\\u") ? read_hex() : 0;
    want(low >= 0xdc00 && low <= 0xdfff, "half a character, surrogates not allowed");
    return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
  }

  uint32_t read_hex() {
    uint32_t code = 0;
    const auto* until = at_ + std::min<ptrdiff_t>(4, end_ - at_);
    const auto ended = std::from_chars(at_, until, code, 16);
    want(ended.ec == std::errc() && ended.ptr == at_ + 4, "Expecting four hexadecimal digits");
    at_ = until;
    return code;
  }

  Json read_number() {
    const auto* from = at_;
    const auto skip_digits = [&](const char* words) {
      want(at_ < end_ && is_digit(*at_), words);
      while (at_ < end_ && is_digit(*at_)) ++at_;
    };
    take('-');
    if (!take('0')) skip_digits("Expecting value");
    bool whole = true;
    if (take('.')) whole = false, skip_digits("Expecting a digit");
    if (take('e') || take('E')) {
      whole = false;
      if (!take('+')) take('-');
      skip_digits("Expecting a digit");
    }
    const std::string_view text(from, at_ - from);
    return whole ? read_json_integer(text) : Json{read_json_double(text)};
  }

  const char *begin_, *at_, *end_;
};

}  // namespace

const Json* Json::find(std::string_view name) const {
  const auto* object = as<Object>();
  if (!object) return nullptr;
  const auto found = std::find_if(object->begin(), object->end(), [&](const auto& each) { return each.name == name; });
  return found == object->end() ? nullptr : &found->value;
}

void check_json_values(std::string_view text, int64_t most) {
  const auto marks =
      std::count_if(text.begin(), text.end(), [](char c) { return c == '[' || c == '{' || c == ':' || c == ','; });
  refuse_unless(marks <= most, "it has more than ", most, " values");
}

Json parse_json(std::string_view text, int64_t most) {
  check_json_values(text, most);
  check_utf8(text);
  refuse_unless(text.substr(0, 3) != "\xef\xbb\xbf", "it begins with a BOM, where JSON has none");
  return Parser(text).parse();
}

}  // namespace attnpack
