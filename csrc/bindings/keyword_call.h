#pragma once

#include <bindings/arguments.h>

#include <attnpack/ops/score_rules.h>

#include <cstdint>
#include <functional>
#include <string_view>

// Functions that Python calls by place and by name, without the dict of a py::kwargs.
namespace attnpack {

// The arguments of one call, as Python's vectorcall gives them.
class GivenArguments {
 public:
  GivenArguments(const char* function, PyObject* const* values, size_t placed, PyObject* names)
      : function_(function), values_(values), placed_(placed), names_(names) {}

  // Reads what was given. `members` calls its argument with the name of each parameter and the variable that takes it,
  // in the order of the signature. The first `placeable` may be given by place; the first `required` must be given.
  template <class Members>
  void read(size_t required, size_t placeable, const Members& members) const {
    check_placed(placeable);
    uint64_t given = 0;
    for (size_t i = 0; i < placed_; ++i) read_one(members, {}, i, values_[i], given);
    size_t next = placed_;  // keywords tend to come in the order of the signature
    for (size_t i = 0; i < names_count(); ++i) next = read_one(members, name(i), next, values_[placed_ + i], given);
    size_t index = 0;
    if ((given & ((uint64_t{1} << required) - 1)) == (uint64_t{1} << required) - 1) return;
    members([&](const char* parameter, const auto&) {
      if (index < required && !(given >> index & 1)) raise_missing(parameter);
      ++index;
    });
  }

 private:
  // Reads the parameter of this name, or without a name the one at this place. Gives the place after it.
  template <class Members>
  size_t read_one(const Members& members, std::string_view name, size_t place, PyObject* value, uint64_t& given) const {
    for (const size_t from : {place, size_t{0}}) {  // then from the first one on
      size_t index = 0, found = kNone;
      members([&]<class T>(const char* parameter, T& variable) {
        const size_t own = index++;
        if (found != kNone || own < from || (!name.empty() && name != parameter)) return;
        found = own;
        if (given >> own & 1) raise_twice(parameter);
        given |= uint64_t{1} << own;
        variable = read_value<T>(parameter, value, parameter);
      });
      if (found != kNone) return found + 1;
    }
    Names taken;
    members([&](const char* parameter, const auto&) { taken.emplace_back(parameter); });
    raise_unexpected_keyword(function_, std::string(name), taken, "the tensors of a cache");
  }

  static constexpr size_t kNone = SIZE_MAX;
  size_t names_count() const { return names_ ? static_cast<size_t>(PyTuple_GET_SIZE(names_)) : 0; }
  std::string_view name(size_t i) const;
  void check_placed(size_t placeable) const;
  [[noreturn]] void raise_missing(const char* parameter) const;
  [[noreturn]] void raise_twice(const char* parameter) const;

  const char* function_;
  PyObject* const* values_;
  size_t placed_;
  PyObject* names_;
};

using KeywordCall = std::function<py::object(const GivenArguments& given)>;
void add_keyword_function(py::module_& m, const char* name, KeywordCall call);

}  // namespace attnpack
