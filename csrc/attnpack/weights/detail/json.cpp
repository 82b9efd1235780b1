#include <attnpack/weights/detail/json.h>

#include <algorithm>
#include <limits>

#include <nlohmann/json.hpp>

#include <attnpack/weights/detail/file_errors.h>

namespace attnpack {

namespace {

constexpr size_t kDeepest = 127;  // objects and lists in each other, as in serde_json
constexpr int kTooLarge = 406;    // the library's number of that error

// Builds a value from what nlohmann's parser reads, and refuses what only the parser would take.
class JsonBuilder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  Json result;

  bool null() override { return add({}); }
  bool boolean(bool value) override { return add({value}); }
  // A number with a minus: -0 is a double, as in serde_json.
  bool number_integer(int64_t number) override { return number == 0 ? add({-0.0}) : add({number}); }
  bool number_unsigned(uint64_t number) override {
    const bool fits = number <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    return fits ? add({static_cast<int64_t>(number)}) : add({number});
  }
  bool number_float(double number, const std::string&) override { return add({number}); }
  bool string(std::string& text) override { return add({std::move(text)}); }
  bool binary(nlohmann::json::binary_t&) override { return false; }  // in other formats than JSON's text

  bool start_object(size_t) override { return open({Json::Object()}); }
  bool key(std::string& name) override {
    std::get<Json::Object>(open_.back()->value).push_back({std::move(name), {}});
    return true;
  }
  bool end_object() override {
    check_names(std::get<Json::Object>(open_.back()->value));
    return close();
  }
  bool start_array(size_t) override { return open({Json::List()}); }
  bool end_array() override { return close(); }

  bool parse_error(size_t, const std::string& last, const nlohmann::json::exception& error) override {
    refuse_unless(error.id != kTooLarge, "the number ", excerpt(last), " is too large");
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while parsing value - invalid
    // literal; last read: 'N'"
    const std::string_view words = error.what(), last_read = "; last read: ";
    const auto begin = words.find("] ") + 2, end = words.find(last_read);
    refuse_unless(end == words.npos, words.substr(begin, end - begin), last_read, excerpt(last));
    refuse_unless(false, words.substr(begin));
    return false;
  }

 private:
  // Where the next value stands. It stays there while it is open: what holds it grows only after it.
  Json& place() {
    if (open_.empty()) return result;
    auto& holder = open_.back()->value;
    if (auto* object = std::get_if<Json::Object>(&holder)) return object->back().value;
    return std::get<Json::List>(holder).emplace_back();
  }
  bool add(Json value) {
    place() = std::move(value);
    return true;
  }
  bool open(Json value) {
    refuse_unless(open_.size() < kDeepest, "values more than ", kDeepest, " deep in each other");
    auto& opened = place();
    opened = std::move(value);
    open_.push_back(&opened);
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  static void check_names(const Json::Object& object) {
    std::vector<std::string_view> names;
    for (const auto& member : object) names.emplace_back(member.name);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    refuse_unless(twice == names.end(), excerpt(twice == names.end() ? "" : *twice), " is in an object twice");
  }

  std::vector<Json*> open_;  // the objects and lists around the next value
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
  // The parser skips a BOM, and takes a 0 for the end.
  refuse_unless(text.substr(0, 3) != "\xef\xbb\xbf", "it begins with a BOM, where JSON has none");
  const auto zero = text.find('\0');
  refuse_unless(zero == text.npos, "byte ", zero, " is 0, which JSON has not");
  JsonBuilder builder;
  nlohmann::json::sax_parse(text.data(), text.data() + text.size(), &builder);
  return std::move(builder.result);
}

}  // namespace attnpack
