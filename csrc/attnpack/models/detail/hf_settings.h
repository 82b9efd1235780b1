#pragma once

#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/json.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace attnpack {

// The settings in the config.json of a checkpoint directory, by name. A setting that is null counts as absent. Errors
// name the directory and the setting.
class HfSettings {
 public:
  HfSettings(std::string path, Json config) : path_(std::move(path)), config_(std::move(config)) {}

  const std::string& path() const { return path_; }
  // The setting; null if it is absent.
  const Json& get(const char* name) const;
  bool has(const char* name) const { return config_.find(name); }  // null too
  // An int of at least 1; `usual` if it is absent, and an error if there is no usual one.
  int64_t size(const char* name, std::optional<int64_t> usual = std::nullopt) const;
  // A number above 0; `usual` if it is absent.
  double number(const char* name, double usual) const;
  // The value of the setting `name`, which must be a number above 0.
  double as_number(const std::string& name, const Json& value) const;
  // What Python takes as true: neither absent nor false, 0 or empty.
  bool is_set(const char* name) const;
  std::string model_type() const;

  template <typename... Words>
  void check(bool condition, const Words&... words) const {
    refuse_unless(condition, path_, ": ", words...);
  }

 private:
  std::string path_;
  Json config_;
};

bool is_set(const Json& value);

// A number or, as in Python, a bool as 0 or 1; none for another value.
std::optional<double> number_in(const Json& value);

}  // namespace attnpack
