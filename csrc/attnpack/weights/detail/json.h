#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace attnpack {

// A value of JSON. An integer is exact if 64 bits hold it, else a double.
struct Json {
  struct Member;
  using List = std::vector<Json>;
  using Object = std::vector<Member>;  // in the order of the text; each name is there once

  std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string, List, Object> value;

  template <typename T>
  const T* as() const {
    return std::get_if<T>(&value);
  }
  bool is_null() const { return as<std::monostate>(); }
  // The member of that name; none if there is none, or if this is no object.
  const Json* find(std::string_view name) const;
};
struct Json::Member {
  std::string name;
  Json value;
};

inline constexpr int64_t kLongestJson = 100'000'000;  // bytes, the limit of Rust's safetensors for a header
// The most [ { : and , in the text, an upper bound on the number of values; a vocabulary of 262,144 tokens has 2.1
// million.
inline constexpr int64_t kMostJsonMarks = 6'000'000;

// The value in the text. Takes what Rust's serde_json takes, but for names that stand twice in an object. Raises a
// c10::ValueError, for more than `most` values too: each may cost 100 bytes of memory.
Json parse_json(std::string_view text, int64_t most = kMostJsonMarks);

// Raises for text with more than `most` values.
void check_json_values(std::string_view text, int64_t most = kMostJsonMarks);

// The value as Python shows it; no more than the beginning of a long one.
std::string shown(const Json& value);

// The value in an error sentence: an excerpt of what shown() gives, or "absent" for none. It becomes text when the
// sentence is written, so that a check that passes does not pay for it.
struct Quoted {
  const Json* value;
};
inline Quoted quoted(const Json& value) { return {&value}; }
inline Quoted quoted(const Json* value) { return {value}; }
std::ostream& operator<<(std::ostream& stream, const Quoted& quoted);

// "a list": the value's type with Python's name.
const char* kind_of(const Json& value);

}  // namespace attnpack
