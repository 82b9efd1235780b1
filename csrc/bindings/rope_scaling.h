#pragma once

#include <bindings/common.h>

#include <attnpack/core/check.h>
#include <attnpack/rope/scaling.h>

#include <optional>
#include <set>
#include <string>

namespace attnpack {

// The "rope_scaling" dict of Hugging Face configs, or None.
template <>
struct Reader<std::optional<RopeScaling>> {
  static std::optional<std::optional<RopeScaling>> read(const py::handle& value) {
    if (value.is_none()) return std::optional<RopeScaling>();
    if (!py::isinstance<py::dict>(value)) return std::nullopt;
    static const std::set<std::string> ignored{"rope_theta", "partial_rotary_factor", "finetuned"};  // arguments
    const auto dict = py::reinterpret_borrow<py::dict>(value);
    ATTNPACK_CHECK(dict.empty() || dict.contains("rope_type") || dict.contains("type"), "scaling: got ",
                   py::repr(dict).cast<std::string>(), " without rope_type, want one, as in {'rope_type': 'linear'}");
    RopeScaling result;
    for (const auto& [key, item] : dict) {
      const auto name = py::str(key).cast<std::string>();
      const bool known = name == "type" ? read_type(dict, item, result) : read_item("scaling", name, item, result);
      ATTNPACK_CHECK(known || ignored.contains(name), "scaling: got '", name,
                     "', which no rope_type here knows; leave it out, or see the docstring of RotaryEmbedding");
    }
    return std::make_optional(result);
  }
  static std::string wanted(const std::string&) {
    return "None or a dict such as {'rope_type': 'linear', 'factor': 2.0}";
  }

 private:
  // "type" is the older name of rope_type.
  static bool read_type(const py::dict& dict, const py::handle& item, RopeScaling& result) {
    RopeScaling other;
    if (item.is_none()) return true;
    read_item("scaling", "rope_type", item, result);
    const bool both = dict.contains("rope_type") && !dict["rope_type"].is_none();
    if (both) read_item("scaling", "rope_type", dict["rope_type"], other);
    ATTNPACK_CHECK(!both || other.rope_type() == result.rope_type(), "scaling: got rope_type '", other.rope_type(),
                   "' and type '", result.rope_type(), "', leave one of them out");
    return true;
  }
};

// The dict again: rope_type, and what differs from the default.
inline py::object to_python(const RopeScaling& scaling) {
  const py::dict usual = options_dict(RopeScaling()), all = options_dict(scaling);
  py::dict result;
  for (const auto& [name, value] : all)
    if (name.cast<std::string>() == "rope_type" || !value.equal(usual[name])) result[name] = value;
  return result;
}

// Shows the settings that `get` finds in a bound object.
template <typename Class, typename Get>
void show_rope_settings(Class& cls, const Get& get) {
  using Self = typename Class::type;
  const auto show = [&](const char* name, auto member) {
    cls.def_property_readonly(name, [get, member](const Self& self) { return get(self).*member; });
  };
  show("inv_freq", &RopeSettings::inv_freq);
  show("factor", &RopeSettings::factor);
  show("interleaved", &RopeSettings::interleaved);
  show("long_inv_freq", &RopeSettings::long_inv_freq);
  show("growth", &RopeSettings::growth);
  show("trained_len", &RopeSettings::trained_len);
  show("raw_keys", &RopeSettings::raw_keys);
  show("softmax_factor", &RopeSettings::softmax_factor);
}

}  // namespace attnpack
