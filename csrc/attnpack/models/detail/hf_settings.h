#pragma once

#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/json.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attnpack {

// A family's own name of a setting that others have too. Some families take the usual name where their own is absent
// (transformers' attribute_map); the others ignore it.
struct HfAlias {
  const char *usual, *theirs;
  bool takes_usual = false;
};
using HfAliases = std::vector<HfAlias>;

// Models with pictures or sound, whose text_config describes a language model that text by itself runs through as if it
// stood alone.
inline constexpr std::string_view kMultimodal[] = {"gemma3", "gemma4", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe"};

// A size that released files leave out, because the family's class in transformers has it.
struct HfSize {
  const char* setting;
  int64_t size;
};

// The settings in the config.json of a checkpoint directory, by name. A setting that is null counts as absent. Errors
// name the directory and the setting.
class HfSettings {
 public:
  HfSettings(std::string path, Json config) : path_(std::move(path)), config_(std::move(config)) {}

  const std::string& path() const { return path_; }
  // If the model has pictures or sound, takes the settings of its language model from now on.
  void enter_language_model();
  bool multimodal() const { return multimodal_; }
  // From now on these settings are found under their other names too.
  void set_aliases(const HfAliases& aliases) { aliases_ = aliases; }
  // From now on these sizes are there, unless they were.
  void fill_in(const std::vector<HfSize>& sizes);
  // The name under which the setting stands here.
  const char* called(const char* name) const;
  // The setting; null if it is absent.
  const Json& get(const char* name) const;
  bool has(const char* name) const { return config_.find(called(name)); }  // null too
  // An int of at least 1; `usual` if it is absent, and an error if there is no usual one.
  int64_t size(const char* name, std::optional<int64_t> usual = std::nullopt) const;
  // The same, where 0 is legal too.
  int64_t whole_number(const char* name, int64_t usual) const;
  // A number above 0; `usual` if it is absent.
  double number(const char* name, double usual) const;
  // The same, and null is 0, which stands for none. In a configuration 0 is none to no one: it makes all scores 0.
  double softcap(const char* name, double usual) const;
  // Ints; none if it is absent.
  std::vector<int64_t> list_of_ints(const char* name) const;
  // Whether it is this word.
  bool is_word(const char* name, std::string_view word) const;
  // Raises for another word; absent is legal.
  void check_word(const char* name, std::string_view word) const;
  // The value of the setting `name`, which must be a number above 0.
  double as_number(const std::string& name, const Json& value) const;
  // Whether Python takes the value as true: it is neither absent nor false, 0 or empty.
  bool is_set(const char* name) const;
  // A switch; raises for what is neither true nor false.
  bool is_on(const char* name, bool usual = false) const;
  // Raises for a setting that is on.
  void refuse_if_set(const char* name) const;
  std::string model_type() const;
  // Raises for a setting that is on, that nobody asked for, and that is not known to leave the numbers as they are.
  void check_all_read() const;

  template <typename... Words>
  void check(bool condition, const Words&... words) const {
    refuse_unless(condition, path_, ": ", words...);
  }

 private:
  std::string path_;
  Json config_;
  HfAliases aliases_;
  bool multimodal_ = false;
  mutable std::set<std::string> asked_;
};

bool is_set(const Json& value);

// A number or, as in Python, a bool as 0 or 1; none for another value.
std::optional<double> number_in(const Json& value);

}  // namespace attnpack
