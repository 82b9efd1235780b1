#pragma once

#include <string>

// torch's header of vmap levels includes this library, and its wheel lacks it. These are the names that the header
// takes from it, for functions that nobody here calls.
namespace nlohmann {

struct json {
  json() = default;
  template <class T>
  explicit json(const T&);
  std::string dump() const;
  static json parse(const std::string& text);
  template <class T>
  T get() const;
};

}  // namespace nlohmann
