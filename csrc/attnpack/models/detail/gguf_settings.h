#pragma once

#include <attnpack/models/detail/checkpoint_checks.h>
#include <attnpack/weights/detail/file_errors.h>
#include <attnpack/weights/detail/gguf_file.h>
#include <attnpack/weights/detail/json.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace attnpack {

// The settings of a GGUF file's model, checked as they are read: the metadata whose keys begin with the name of its
// architecture, which is left out here. Errors name the file and the whole key.
class GgufSettings {
 public:
  // Raises unless the file is a whole model.
  explicit GgufSettings(std::shared_ptr<const GgufFile> file);

  const GgufFile& file() const { return *file_; }
  const std::string& path() const { return file_->path(); }
  const std::string& architecture() const { return architecture_; }
  // The key as the file has it.
  std::string full(const std::string& key) const { return architecture_ + "." + key; }
  // The setting; null if it is absent.
  const Json& get(const std::string& key) const;
  bool has(const std::string& key) const { return !get(key).is_null(); }
  // Whether Python takes the value as true: it is neither absent nor false, 0 or empty.
  bool is_set(const std::string& key) const;
  // A switch; raises for what is no bool.
  bool is_on(const std::string& key, bool usual) const;
  // Whether it is absent, or this switch.
  bool is_usual(const std::string& key, bool usual) const;
  // An int of at least 1; `usual` if it is absent, and an error if there is no usual one.
  int64_t size(const std::string& key, std::optional<int64_t> usual = std::nullopt) const;
  // The same; none if it is absent or 0.
  std::optional<int64_t> size_if_set(const std::string& key) const;
  // A number above 0; `usual` if it is absent, and an error if there is no usual one.
  double number(const std::string& key, std::optional<double> usual = std::nullopt) const;
  // For each layer an int: the file lists them, or has one of at least 1 for all.
  std::vector<int64_t> by_layer(const std::string& key, int64_t layers, std::optional<int64_t> usual = std::nullopt,
                                int64_t least = 1) const;
  bool is_list(const std::string& key) const { return get(key).as<Json::List>(); }
  // For each layer a bool, if the file lists them; with `more` it may list them for further layers too.
  std::optional<std::vector<bool>> bools_by_layer(const std::string& key, int64_t layers, bool more = false) const;
  // The numbers of a tensor of that length; none if the file has no such tensor.
  std::optional<std::vector<double>> vector(const std::string& name, int64_t length) const;
  // Raises for settings that are set, and are none of these numbers: they change what the model computes.
  void refuse(const std::vector<std::string>& keys, std::initializer_list<double> usual = {}) const;

  // The shapes of the tensors by the names of the state dict.
  const Shapes& shapes() const { return shapes_; }
  void set_shapes(Shapes shapes) { shapes_ = std::move(shapes); }
  bool has_shape(const std::string& name) const { return shapes_.count(name); }
  // Whether the name of a tensor of the state dict ends so.
  bool some_name_ends_with(std::string_view ending) const;

  template <typename... Words>
  void check(bool condition, const Words&... words) const {
    refuse_unless(condition, path(), ": ", words...);
  }

 private:
  const Json& required(const std::string& key) const;
  int64_t as_size(const std::string& key, const Json& value) const;

  std::shared_ptr<const GgufFile> file_;
  std::string architecture_;
  Shapes shapes_;
};

}  // namespace attnpack
